/* A slow shared file system: calls on files below some folders take SLOW_MILLISECONDS each, and all processes together
   read SLOW_BANDWIDTH bytes per second. Loaded by LD_PRELOAD; SLOW_FOLDERS are separated by colons, SLOW_STATE is a file
   of eight bytes that the processes share. Libraries that the dynamic linker opens by itself cost nothing. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MOST 65536
static char slow_descriptor[MOST];
static _Atomic long long *free_at;  /* nanoseconds at which the server has sent what was requested so far */
static const char *folders;
static double pause_ns, ns_per_byte;

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

__attribute__((constructor)) static void start(void) {
    const char *state = getenv("SLOW_STATE"), *speed = getenv("SLOW_BANDWIDTH"), *pause = getenv("SLOW_MILLISECONDS");
    folders = getenv("SLOW_FOLDERS");
    if (!folders || !state || !speed || !pause) { folders = NULL; return; }
    pause_ns = atof(pause) * 1e6;
    ns_per_byte = 1e9 / atof(speed);
    int handle = REAL(open)(state, O_RDWR);
    void *memory = handle < 0 ? MAP_FAILED : REAL(mmap)(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, handle, 0);
    if (memory == MAP_FAILED) { folders = NULL; return; }
    free_at = memory;
}

static long long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void sleep_ns(double ns) {
    if (ns <= 0) return;
    struct timespec time = {(time_t)(ns / 1e9), (long)(ns - 1e9 * (long long)(ns / 1e9))};
    nanosleep(&time, NULL);
}

static int is_slow(const char *path) {
    if (!folders || !path || path[0] != '/') return 0;
    for (const char *folder = folders; *folder;) {
        size_t length = strcspn(folder, ":");
        if (length && !strncmp(path, folder, length) && (path[length] == '/' || !path[length])) return 1;
        folder += length + (folder[length] == ':');
    }
    return 0;
}

static int wait_for(const char *path) {
    int slow = is_slow(path);
    if (slow) sleep_ns(pause_ns);
    return slow;
}

static void transfer(long long bytes) {
    if (!free_at || bytes <= 0) return;
    long long cost = (long long)(bytes * ns_per_byte), before = *free_at, begin, at = now();
    do {
        begin = before > at ? before : at;
    } while (!__atomic_compare_exchange_n((long long *)free_at, &before, begin + cost, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    sleep_ns((double)(begin + cost - at));
}

static int opened(int handle, int slow) {
    if (handle >= 0 && handle < MOST) slow_descriptor[handle] = (char)slow;
    return handle;
}

#define MODE mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

int open(const char *path, int flags, ...) { MODE return opened(REAL(open)(path, flags, mode), wait_for(path)); }
int open64(const char *path, int flags, ...) { MODE return opened(REAL(open64)(path, flags, mode), wait_for(path)); }
int openat(int at, const char *path, int flags, ...) { MODE return opened(REAL(openat)(at, path, flags, mode), wait_for(path)); }
int openat64(int at, const char *path, int flags, ...) { MODE return opened(REAL(openat64)(at, path, flags, mode), wait_for(path)); }
int stat(const char *path, struct stat *found) { wait_for(path); return REAL(stat)(path, found); }
int lstat(const char *path, struct stat *found) { wait_for(path); return REAL(lstat)(path, found); }
int stat64(const char *path, struct stat64 *found) { wait_for(path); return REAL(stat64)(path, found); }
int lstat64(const char *path, struct stat64 *found) { wait_for(path); return REAL(lstat64)(path, found); }
int access(const char *path, int mode) { wait_for(path); return REAL(access)(path, mode); }
ssize_t readlink(const char *path, char *text, size_t size) { wait_for(path); return REAL(readlink)(path, text, size); }
DIR *opendir(const char *path) { wait_for(path); return REAL(opendir)(path); }

ssize_t read(int handle, void *memory, size_t size) {
    ssize_t found = REAL(read)(handle, memory, size);
    if (handle >= 0 && handle < MOST && slow_descriptor[handle]) { sleep_ns(pause_ns); transfer(found); }
    return found;
}

void *dlopen(const char *path, int flags) {
    struct stat found;
    if (is_slow(path) && !REAL(stat)(path, &found)) { sleep_ns(pause_ns); transfer(found.st_size); }
    return REAL(dlopen)(path, flags);
}

int close(int handle) {
    if (handle >= 0 && handle < MOST) slow_descriptor[handle] = 0;
    return REAL(close)(handle);
}
