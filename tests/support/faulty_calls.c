/* Let system calls below one folder fail for a while: LD_PRELOAD of tests/train/test_transient_faults.py.
 *
 * The file $FAULTS holds "CALL ERRNO SECONDS FOLDER", and is read anew when it changes. From then on all calls of this
 * kind fail for so many seconds. Every call below the folder is noted in $FAULTS.seen, every failed one with "!".
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static char kind[32], folder[PATH_MAX];
static int number;
static double seconds, since;
static struct timespec changed;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void note(const char *call, const char *mark) {
    char path[PATH_MAX], line[64];
    snprintf(path, sizeof path, "%s.seen", getenv("FAULTS"));
    int handle = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    int n = snprintf(line, sizeof line, "%s%s\n", call, mark);
    if (handle >= 0) {
        if (syscall(SYS_write, handle, line, n) < 0) abort();
        syscall(SYS_close, handle);
    }
}

static void look(void) {
    struct stat found;
    const char *control = getenv("FAULTS");
    if (!control || syscall(SYS_newfstatat, AT_FDCWD, control, &found, 0)) {
        folder[0] = 0;
        return;
    }
    if (!memcmp(&found.st_mtim, &changed, sizeof changed)) return;
    changed = found.st_mtim;
    char text[PATH_MAX + 128] = {0};
    int handle = syscall(SYS_openat, AT_FDCWD, control, O_RDONLY | O_CLOEXEC);
    if (handle < 0 || syscall(SYS_read, handle, text, sizeof text - 1) < 0) abort();
    syscall(SYS_close, handle);
    since = changed.tv_sec + changed.tv_nsec / 1e9;
    if (sscanf(text, "%31s %d %lf %4000s", kind, &number, &seconds, folder) != 4) folder[0] = 0;
}

static int fails(const char *call, int at, const char *path) {
    char real[PATH_MAX], link[64];
    look();
    if (!folder[0]) return 0;
    if (!path || path[0] != '/') {
        snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        ssize_t n = at == AT_FDCWD ? -1 : syscall(SYS_readlinkat, AT_FDCWD, link, real, sizeof real - 1);
        if (n < 0) return 0;
        real[n] = 0;
        path = real;
    }
    if (strncmp(path, folder, strlen(folder))) return 0;
    int hit = !strcmp(call, kind);
    if (hit && now() - since > seconds) hit = 0;
    note(call, hit ? "!" : "");
    if (hit) errno = number;
    return hit;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define OPEN(name, shown) \
    int name(const char *path, int flags, ...) { \
        REAL(int, #name, const char *, int, ...); \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, int); va_end(rest); \
        return fails("open", AT_FDCWD, path) ? -1 : real(path, flags, mode); \
    }
OPEN(open, "open")
OPEN(open64, "open")

#define PATHS(type, failed, name, shown, parameters, arguments, path, ...) \
    type name parameters { REAL(type, #name, __VA_ARGS__); return fails(shown, AT_FDCWD, path) ? failed : real arguments; }
PATHS(int, -1, stat, "stat", (const char *a, struct stat *b), (a, b), a, const char *, struct stat *)
PATHS(int, -1, lstat, "stat", (const char *a, struct stat *b), (a, b), a, const char *, struct stat *)
PATHS(int, -1, stat64, "stat", (const char *a, struct stat64 *b), (a, b), a, const char *, struct stat64 *)
PATHS(int, -1, lstat64, "stat", (const char *a, struct stat64 *b), (a, b), a, const char *, struct stat64 *)
PATHS(int, -1, mkdir, "mkdir", (const char *a, mode_t b), (a, b), a, const char *, mode_t)
PATHS(int, -1, unlink, "unlink", (const char *a), (a), a, const char *)
PATHS(int, -1, rename, "rename", (const char *a, const char *b), (a, b), b, const char *, const char *)
PATHS(int, -1, link, "link", (const char *a, const char *b), (a, b), b, const char *, const char *)
PATHS(DIR *, NULL, opendir, "opendir", (const char *a), (a), a, const char *)

#define HANDLES(type, name, shown, parameters, arguments, handle, ...) \
    type name parameters { REAL(type, #name, __VA_ARGS__); return fails(shown, handle, NULL) ? -1 : real arguments; }
HANDLES(int, fstat, "fstat", (int a, struct stat *b), (a, b), a, int, struct stat *)
HANDLES(int, fstat64, "fstat", (int a, struct stat64 *b), (a, b), a, int, struct stat64 *)
HANDLES(int, fsync, "fsync", (int a), (a), a, int)
HANDLES(int, ftruncate, "ftruncate", (int a, off_t b), (a, b), a, int, off_t)
HANDLES(int, ftruncate64, "ftruncate", (int a, off64_t b), (a, b), a, int, off64_t)
HANDLES(ssize_t, read, "read", (int a, void *b, size_t c), (a, b, c), a, int, void *, size_t)
HANDLES(ssize_t, write, "write", (int a, const void *b, size_t c), (a, b, c), a, int, const void *, size_t)
HANDLES(ssize_t, pread, "pread", (int a, void *b, size_t c, off_t d), (a, b, c, d), a, int, void *, size_t, off_t)
HANDLES(ssize_t, pread64, "pread", (int a, void *b, size_t c, off64_t d), (a, b, c, d), a, int, void *, size_t, off64_t)
HANDLES(ssize_t, pwrite, "pwrite", (int a, const void *b, size_t c, off_t d), (a, b, c, d), a, int, const void *, size_t, off_t)
HANDLES(ssize_t, pwrite64, "pwrite", (int a, const void *b, size_t c, off64_t d), (a, b, c, d), a, int, const void *, size_t, off64_t)
HANDLES(ssize_t, preadv, "pread", (int a, const struct iovec *b, int c, off_t d), (a, b, c, d), a, int, const struct iovec *, int, off_t)
HANDLES(ssize_t, preadv2, "pread", (int a, const struct iovec *b, int c, off_t d, int e), (a, b, c, d, e), a, int, const struct iovec *, int, off_t, int)
HANDLES(ssize_t, preadv64v2, "pread", (int a, const struct iovec *b, int c, off64_t d, int e), (a, b, c, d, e), a, int, const struct iovec *, int, off64_t, int)
HANDLES(ssize_t, pwritev, "pwrite", (int a, const struct iovec *b, int c, off_t d), (a, b, c, d), a, int, const struct iovec *, int, off_t)
HANDLES(ssize_t, pwritev2, "pwrite", (int a, const struct iovec *b, int c, off_t d, int e), (a, b, c, d, e), a, int, const struct iovec *, int, off_t, int)
HANDLES(ssize_t, pwritev64v2, "pwrite", (int a, const struct iovec *b, int c, off64_t d, int e), (a, b, c, d, e), a, int, const struct iovec *, int, off64_t, int)
