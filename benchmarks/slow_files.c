/* A slow shared file system (FUSE): "slow_files SOURCE MOUNT" shows the files of SOURCE, to be read only, until it is
   unmounted. A request takes SLOW_MILLISECONDS, and all mounts with the same SLOW_STATE, a file of 64 bytes, together read
   SLOW_BANDWIDTH bytes per second. The kernel keeps names, attributes and pages, as clients of NFS and Lustre do: a mount
   is a node. SLOW_STATE then has the time at which the server is free, and the numbers of requests and of bytes. */
#define FUSE_USE_VERSION 31
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { FREE_AT, REQUESTS, BYTES };
static const char *source;
static int64_t *state; /* FREE_AT: nanoseconds at which the server has sent what was requested so far */
static double pause_ns, ns_per_byte;

static void sleep_ns(double ns) {
    if (ns <= 0) return;
    struct timespec time = {(time_t)(ns / 1e9), (long)(ns - 1e9 * (double)(int64_t)(ns / 1e9))};
    nanosleep(&time, NULL);
}

static void request(void) {
    __atomic_fetch_add(&state[REQUESTS], 1, __ATOMIC_RELAXED);
    sleep_ns(pause_ns);
}

static void transfer(int64_t bytes) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    int64_t at = time.tv_sec * 1000000000LL + time.tv_nsec, cost = (int64_t)((double)bytes * ns_per_byte), begin;
    int64_t before = state[FREE_AT];
    do {
        begin = before > at ? before : at;
    } while (!__atomic_compare_exchange_n(&state[FREE_AT], &before, begin + cost, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    __atomic_fetch_add(&state[BYTES], bytes, __ATOMIC_RELAXED);
    sleep_ns((double)(begin + cost - at));
}

static const char *original(char *room, const char *path) {
    snprintf(room, 4096, "%s%s", source, path);
    return room;
}

static int slow_getattr(const char *path, struct stat *found, struct fuse_file_info *info) {
    char room[4096];
    request();
    return (info ? fstat((int)info->fh, found) : lstat(original(room, path), found)) ? -errno : 0;
}

static int slow_readlink(const char *path, char *text, size_t size) {
    char room[4096];
    request();
    ssize_t length = readlink(original(room, path), text, size - 1);
    if (length < 0) return -errno;
    text[length] = 0;
    return 0;
}

static int slow_open(const char *path, struct fuse_file_info *info) {
    char room[4096];
    request();
    int handle = open(original(room, path), info->flags & ~(O_CREAT | O_TRUNC));
    if (handle < 0) return -errno;
    info->fh = (uint64_t)handle;
    return 0;
}

static int slow_read(const char *path, char *memory, size_t size, off_t offset, struct fuse_file_info *info) {
    (void)path;
    request();
    ssize_t found = pread((int)info->fh, memory, size, offset);
    if (found < 0) return -errno;
    transfer(found);
    return (int)found;
}

static int slow_release(const char *path, struct fuse_file_info *info) {
    (void)path;
    return close((int)info->fh) ? -errno : 0;
}

static int slow_readdir(const char *path, void *memory, fuse_fill_dir_t fill, off_t offset, struct fuse_file_info *info,
                        enum fuse_readdir_flags flags) {
    (void)offset, (void)info, (void)flags;
    char room[4096];
    request();
    DIR *folder = opendir(original(room, path));
    if (!folder) return -errno;
    for (struct dirent *entry; (entry = readdir(folder));) {
        struct stat found = {.st_ino = entry->d_ino, .st_mode = (mode_t)entry->d_type << 12};
        if (fill(memory, entry->d_name, &found, 0, 0)) break;
    }
    closedir(folder);
    return 0;
}

static void *slow_init(struct fuse_conn_info *connection, struct fuse_config *config) {
    connection->max_readahead = connection->max_write = 1 << 20; /* max_write also limits what one read asks for */
    config->kernel_cache = 1;
    config->entry_timeout = config->attr_timeout = config->negative_timeout = 600;
    return NULL;
}

static const struct fuse_operations operations = {
    .init = slow_init,
    .getattr = slow_getattr,
    .readlink = slow_readlink,
    .open = slow_open,
    .read = slow_read,
    .release = slow_release,
    .readdir = slow_readdir,
};

int main(int count, char **words) {
    const char *file = getenv("SLOW_STATE"), *speed = getenv("SLOW_BANDWIDTH"), *pause = getenv("SLOW_MILLISECONDS");
    int handle = file ? open(file, O_RDWR) : -1;
    if (count != 3 || !speed || !pause || handle < 0) {
        fputs("slow_files SOURCE MOUNT, with SLOW_STATE, SLOW_BANDWIDTH and SLOW_MILLISECONDS set\n", stderr);
        return 2;
    }
    source = words[1];
    pause_ns = atof(pause) * 1e6;
    ns_per_byte = 1e9 / atof(speed);
    state = mmap(NULL, 64, PROT_READ | PROT_WRITE, MAP_SHARED, handle, 0);
    if (state == MAP_FAILED) return 2;
    char *options[] = {words[0], words[2], "-f", "-o", "ro,max_idle_threads=64", NULL};
    return fuse_main(5, options, &operations, NULL);
}
