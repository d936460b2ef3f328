/* Fails, cuts short, loses or kills the n-th file-system call below one directory.
 *
 * Loaded with LD_PRELOAD; stands between a program (Python, TensorStore) and the C library. The driver arms it through
 * ctypes for one fault and disarms it again, as often as it likes. What happened is written to shared memory, so that a
 * parent can read what its killed child was doing. With `record`, every call that changes the disk is kept in order with
 * its data, for replays of a power cut (support/powerloss.py).
 *
 * A path below the directory is found by its text, a descriptor's by /proc/self/fd. One lock makes "decide, call, note"
 * one step, so the recorded order is the order of the file system. Locks that may wait are not made under it.
 */
#define _GNU_SOURCE
#undef _FORTIFY_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

/* Classes of calls. */
enum {
    READ = 1, CREATE = 2, WRITE = 4, SYNC = 8, RENAME = 16, LINK = 32, REMOVE = 64, LOCK = 128, CLOSE = 256,
    GETS = 512, PUTS = 1024 /* besides READ or WRITE: bytes are moved, so the call can be cut short */
};
/* What the chosen call does. */
enum { PASS = -1, FAIL, KILL, TORN, SHORT, LOSE, DO_AND_FAIL, SHUTDOWN };

#define LOG_BYTES (4u << 20)
#define DATA_BYTES (64u << 20)

struct shared {
    uint64_t calls;     /* so far, below the directory */
    int64_t fired;      /* index of the call that was hit, or -1 */
    uint64_t log_used;  /* bytes of `log` */
    uint64_t data_used; /* bytes of `data` */
    uint64_t lost;      /* what did not fit into either */
    char log[LOG_BYTES];
    char data[DATA_BYTES];
};

static struct shared *shared;
static char root[PATH_MAX];
static size_t root_length;
static volatile int armed, recording;
static int64_t chosen;
static int mode, error_number;
static unsigned hits;   /* classes that may be hit: threads make the order of calls differ from run to run */
static unsigned sticky; /* classes that fail from then on */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* --- control, called through ctypes ------------------------------------------------------------------------------ */

__attribute__((constructor)) static void start(void) {
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (shared == MAP_FAILED) abort();
}

void *faultshim_shared(void) { return shared; }

void faultshim_disarm(void) { armed = 0; }

void faultshim_arm(const char *directory, int64_t at, int what, int number, unsigned first, unsigned then, int record) {
    armed = 0;
    snprintf(root, sizeof root, "%s", directory);
    root_length = strlen(root);
    chosen = at;
    mode = what;
    error_number = number;
    hits = first;
    sticky = then;
    recording = record;
    shared->calls = shared->log_used = shared->data_used = shared->lost = 0;
    shared->fired = -1;
    armed = 1;
}

/* --- the decision -------------------------------------------------------------------------------------------------- */

static int is_below(const char *path) {
    return strncmp(path, root, root_length) == 0 && (path[root_length] == '/' || path[root_length] == 0);
}

static int path_of_fd(int fd, char *out) {
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(name, out, PATH_MAX - 1);
    if (n < 0) return 0;
    out[n] = 0;
    return is_below(out);
}

/* The absolute path of a name relative to a descriptor; 0 when it is not below the directory. */
static int path_at(int fd, const char *name, char *out) {
    if (!name) return 0;
    if (name[0] == '/') {
        if (!is_below(name)) return 0;
        snprintf(out, PATH_MAX, "%s", name);
        return 1;
    }
    char base[PATH_MAX];
    if (fd == AT_FDCWD ? !getcwd(base, sizeof base) || !is_below(base) : !path_of_fd(fd, base)) return 0;
    return snprintf(out, PATH_MAX, name[0] ? "%s/%s" : "%s%s", base, name) < PATH_MAX;
}

static void note_call(unsigned class, const char *call, const char *path, int hit) {
    size_t left = LOG_BYTES - shared->log_used;
    int n = snprintf(shared->log + shared->log_used, left, "%u\t%s\t%s%s\n", class, call, path + root_length,
                     hit ? "\t<" : "");
    if (n > 0 && (size_t)n < left) shared->log_used += n;
    else shared->lost++;
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static void shut_down(void) {
    /* FS_IOC_SHUTDOWN without flushing the log: the power is cut. */
    uint32_t flags = 2;
    DIR *(*real)(const char *) = dlsym(RTLD_NEXT, "opendir");
    DIR *directory = real(root);
    if (!directory || ioctl(dirfd(directory), _IOR('X', 125, uint32_t), &flags)) shared->lost++;
    if (directory) closedir(directory);
}

/* Counts a call; says what is to become of it. The lock is held. */
static int decide(unsigned class, const char *call, const char *path) {
    int64_t index = shared->calls++;
    int hit = chosen >= 0 && index >= chosen && shared->fired < 0 && (class & hits);
    note_call(class, call, path, hit);
    if (hit) {
        shared->fired = index;
        if (mode == KILL) die();
        if (mode == SHUTDOWN) {
            shut_down();
            return PASS;
        }
        return mode;
    }
    return shared->fired >= 0 && (class & sticky) ? FAIL : PASS;
}

/* --- the record ---------------------------------------------------------------------------------------------------- */

/* operation, offset, lengths of two paths (relative to the directory) and of the data, then those. */
static void record(char operation, int64_t offset, const char *path, const char *other, const void *data, size_t size) {
    if (!recording) return;
    path += root_length;
    if (other) other += root_length;
    uint32_t header[4] = {(uint32_t)operation, strlen(path), other ? strlen(other) : 0, size};
    size_t need = sizeof header + sizeof offset + header[1] + header[2] + size;
    if (need > DATA_BYTES - shared->data_used) {
        shared->lost++;
        return;
    }
    char *out = shared->data + shared->data_used;
    memcpy(out, header, sizeof header), out += sizeof header;
    memcpy(out, &offset, sizeof offset), out += sizeof offset;
    memcpy(out, path, header[1]), out += header[1];
    if (other) memcpy(out, other, header[2]), out += header[2];
    if (size) memcpy(out, data, size);
    shared->data_used += need;
}

void faultshim_mark(void) {
    pthread_mutex_lock(&lock);
    record('!', 0, root, NULL, NULL, 0);
    pthread_mutex_unlock(&lock);
}

/* --- the calls ----------------------------------------------------------------------------------------------------- */

/* A call of ours is decided on, made and noted under the lock; any other is passed on untouched. */
#define CALL(type, symbol, class, PARAMETERS, ARGUMENTS, IS_OURS, failure, note)  \
    type symbol PARAMETERS {                                                       \
        static type(*real) PARAMETERS;                                             \
        if (!real) real = dlsym(RTLD_NEXT, #symbol);                               \
        char path[PATH_MAX], other[PATH_MAX];                                      \
        (void)other;                                                               \
        if (!armed || !(IS_OURS)) return real ARGUMENTS;                           \
        type result = failure;                                                     \
        pthread_mutex_lock(&lock);                                                 \
        int what = decide(class, #symbol, path);                                   \
        if (what == PASS || what == DO_AND_FAIL) result = real ARGUMENTS;          \
        int saved = errno;                                                         \
        if (result != failure) { note; }                                           \
        if (what == LOSE) result = 0;                                              \
        else if (what != PASS) result = failure, saved = error_number;             \
        pthread_mutex_unlock(&lock);                                               \
        errno = saved;                                                             \
        return result;                                                             \
    }

#define AT(fd, name) path_at(fd, name, path)
#define HERE(name) path_at(AT_FDCWD, name, path)
#define OF(fd) path_of_fd(fd, path)
#define TWO(fd, name, fd2, name2) (path_at(fd, name, path) && path_at(fd2, name2, other))
#define NOTHING (void)0

/* What looks and does not change. */
CALL(int, stat, READ, (const char *name, void *out), (name, out), HERE(name), -1, NOTHING)
CALL(int, stat64, READ, (const char *name, void *out), (name, out), HERE(name), -1, NOTHING)
CALL(int, lstat, READ, (const char *name, void *out), (name, out), HERE(name), -1, NOTHING)
CALL(int, lstat64, READ, (const char *name, void *out), (name, out), HERE(name), -1, NOTHING)
CALL(int, fstat, READ, (int fd, void *out), (fd, out), OF(fd), -1, NOTHING)
CALL(int, fstat64, READ, (int fd, void *out), (fd, out), OF(fd), -1, NOTHING)
CALL(int, fstatat, READ, (int fd, const char *name, void *out, int flags), (fd, name, out, flags), AT(fd, name), -1,
     NOTHING)
CALL(int, fstatat64, READ, (int fd, const char *name, void *out, int flags), (fd, name, out, flags), AT(fd, name), -1,
     NOTHING)
CALL(int, statx, READ, (int fd, const char *name, int flags, unsigned mask, void *out), (fd, name, flags, mask, out),
     AT(fd, name), -1, NOTHING)
CALL(int, __xstat, READ, (int v, const char *name, void *out), (v, name, out), HERE(name), -1, NOTHING)
CALL(int, __xstat64, READ, (int v, const char *name, void *out), (v, name, out), HERE(name), -1, NOTHING)
CALL(int, __lxstat, READ, (int v, const char *name, void *out), (v, name, out), HERE(name), -1, NOTHING)
CALL(int, __lxstat64, READ, (int v, const char *name, void *out), (v, name, out), HERE(name), -1, NOTHING)
CALL(int, __fxstat, READ, (int v, int fd, void *out), (v, fd, out), OF(fd), -1, NOTHING)
CALL(int, __fxstat64, READ, (int v, int fd, void *out), (v, fd, out), OF(fd), -1, NOTHING)
CALL(int, __fxstatat, READ, (int v, int fd, const char *name, void *out, int flags), (v, fd, name, out, flags),
     AT(fd, name), -1, NOTHING)
CALL(int, __fxstatat64, READ, (int v, int fd, const char *name, void *out, int flags), (v, fd, name, out, flags),
     AT(fd, name), -1, NOTHING)
CALL(int, access, READ, (const char *name, int how), (name, how), HERE(name), -1, NOTHING)
CALL(int, faccessat, READ, (int fd, const char *name, int how, int flags), (fd, name, how, flags), AT(fd, name), -1,
     NOTHING)
CALL(ssize_t, readlink, READ, (const char *name, char *out, size_t size), (name, out, size), HERE(name), -1, NOTHING)
CALL(DIR *, opendir, READ, (const char *name), (name), HERE(name), NULL, NOTHING)
CALL(DIR *, fdopendir, READ, (int fd), (fd), OF(fd), NULL, NOTHING)

/* What changes the disk. */
CALL(int, mkdir, CREATE, (const char *name, mode_t bits), (name, bits), HERE(name), -1, record('d', 0, path, 0, 0, 0))
CALL(int, mkdirat, CREATE, (int fd, const char *name, mode_t bits), (fd, name, bits), AT(fd, name), -1,
     record('d', 0, path, 0, 0, 0))
CALL(int, rename, RENAME, (const char *from, const char *to), (from, to), TWO(AT_FDCWD, from, AT_FDCWD, to), -1,
     record('r', 0, path, other, 0, 0))
CALL(int, renameat, RENAME, (int fd, const char *from, int fd2, const char *to), (fd, from, fd2, to),
     TWO(fd, from, fd2, to), -1, record('r', 0, path, other, 0, 0))
CALL(int, renameat2, RENAME, (int fd, const char *from, int fd2, const char *to, unsigned flags),
     (fd, from, fd2, to, flags), TWO(fd, from, fd2, to), -1, record(flags & RENAME_EXCHANGE ? 'x' : 'r', 0, path, other, 0, 0))
CALL(int, link, LINK, (const char *from, const char *to), (from, to), TWO(AT_FDCWD, from, AT_FDCWD, to), -1,
     record('l', 0, path, other, 0, 0))
CALL(int, linkat, LINK, (int fd, const char *from, int fd2, const char *to, int flags), (fd, from, fd2, to, flags),
     TWO(fd, from, fd2, to), -1, record('l', 0, path, other, 0, 0))
CALL(int, symlink, LINK, (const char *text, const char *name), (text, name), HERE(name), -1, shared->lost++)
CALL(int, unlink, REMOVE, (const char *name), (name), HERE(name), -1, record('u', 0, path, 0, 0, 0))
CALL(int, unlinkat, REMOVE, (int fd, const char *name, int flags), (fd, name, flags), AT(fd, name), -1,
     record('u', 0, path, 0, 0, 0))
CALL(int, rmdir, REMOVE, (const char *name), (name), HERE(name), -1, record('u', 0, path, 0, 0, 0))
CALL(int, ftruncate, WRITE, (int fd, off_t size), (fd, size), OF(fd), -1, record('t', size, path, 0, 0, 0))
CALL(int, ftruncate64, WRITE, (int fd, off64_t size), (fd, size), OF(fd), -1, record('t', size, path, 0, 0, 0))
CALL(int, fsync, SYNC, (int fd), (fd), OF(fd), -1, record('s', 0, path, 0, 0, 0))
CALL(int, fdatasync, SYNC, (int fd), (fd), OF(fd), -1, record('s', 0, path, 0, 0, 0))
CALL(int, fchmod, WRITE, (int fd, mode_t bits), (fd, bits), OF(fd), -1, NOTHING)
CALL(int, chmod, WRITE, (const char *name, mode_t bits), (name, bits), HERE(name), -1, NOTHING)
CALL(int, utimensat, WRITE, (int fd, const char *name, const struct timespec t[2], int flags), (fd, name, t, flags),
     AT(fd, name), -1, NOTHING)
/* Never made by us so far; a record that has one is void. */
CALL(ssize_t, sendfile, WRITE, (int out, int in, off_t *at, size_t size), (out, in, at, size), OF(out), -1, shared->lost++)
CALL(ssize_t, sendfile64, WRITE, (int out, int in, off64_t *at, size_t size), (out, in, at, size), OF(out), -1,
     shared->lost++)
CALL(ssize_t, copy_file_range, WRITE, (int in, off64_t *a, int out, off64_t *b, size_t size, unsigned flags),
     (in, a, out, b, size, flags), OF(out), -1, shared->lost++)

/* A lock may be waited for, so it is not asked for under ours; close frees the descriptor even when it fails. */
#define OUTSIDE(symbol, class, PARAMETERS, ARGUMENTS, IS_OURS, closes)  \
    int symbol PARAMETERS {                                              \
        static int(*real) PARAMETERS;                                    \
        if (!real) real = dlsym(RTLD_NEXT, #symbol);                     \
        char path[PATH_MAX];                                             \
        if (!armed || !(IS_OURS)) return real ARGUMENTS;                 \
        pthread_mutex_lock(&lock);                                       \
        int what = decide(class, #symbol, path);                         \
        pthread_mutex_unlock(&lock);                                     \
        if (what == PASS) return real ARGUMENTS;                         \
        if (closes) real ARGUMENTS;                                      \
        errno = error_number;                                            \
        return -1;                                                       \
    }

static int is_writable(int fd) {
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && (flags & O_ACCMODE) != O_RDONLY;
}

OUTSIDE(flock, LOCK, (int fd, int how), (fd, how), OF(fd), 0)
OUTSIDE(close, CLOSE, (int fd), (fd), is_writable(fd) && OF(fd), 1)

int fcntl(int fd, int command, ...) {
    static int (*real)(int, int, ...);
    if (!real) real = dlsym(RTLD_NEXT, "fcntl");
    va_list list;
    va_start(list, command);
    void *argument = va_arg(list, void *);
    va_end(list);
    char path[PATH_MAX];
    int locks = command == F_OFD_SETLK || command == F_OFD_SETLKW || command == F_SETLK || command == F_SETLKW;
    if (armed && locks && OF(fd)) {
        pthread_mutex_lock(&lock);
        int what = decide(LOCK, "fcntl", path);
        pthread_mutex_unlock(&lock);
        if (what != PASS) return errno = error_number, -1;
    }
    return real(fd, command, argument);
}

/* The end of a directory is NULL without an error. */
#define READDIR(symbol, type)                                                \
    struct type *symbol(DIR *directory) {                                    \
        static struct type *(*real)(DIR *);                                  \
        if (!real) real = dlsym(RTLD_NEXT, #symbol);                         \
        char path[PATH_MAX];                                                 \
        if (!armed || !OF(dirfd(directory))) return real(directory);         \
        pthread_mutex_lock(&lock);                                           \
        int what = decide(READ, #symbol, path);                              \
        pthread_mutex_unlock(&lock);                                         \
        if (what == PASS) return real(directory);                            \
        errno = error_number;                                                \
        return NULL;                                                         \
    }
READDIR(readdir, dirent)
READDIR(readdir64, dirent64)

static int opened(int fd, const char *name, int flags, mode_t bits) {
    static int (*real)(int, const char *, int, ...);
    if (!real) real = dlsym(RTLD_NEXT, "openat64");
    static int (*look)(int, const char *, int, int);
    if (!look) look = dlsym(RTLD_NEXT, "faccessat");
    char path[PATH_MAX];
    if (!armed || !AT(fd, name)) return real(fd, name, flags, bits);
    int creates = (flags & O_CREAT) != 0, result = -1;
    pthread_mutex_lock(&lock);
    int what = decide(creates ? CREATE : READ, creates ? "create" : "open", path);
    int is_new = creates && look(AT_FDCWD, path, F_OK, AT_SYMLINK_NOFOLLOW) != 0;
    if (what == PASS) result = real(fd, name, flags, bits);
    int saved = what == PASS ? errno : error_number;
    if (result >= 0 && is_new) record('c', 0, path, 0, 0, 0);
    else if (result >= 0 && flags & O_TRUNC) record('t', 0, path, 0, 0, 0);
    pthread_mutex_unlock(&lock);
    errno = saved;
    return result;
}

static int needs_mode(int flags) { return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE; }

#define OPEN(symbol, PARAMETERS, fd)             \
    int symbol PARAMETERS {                      \
        mode_t bits = 0;                         \
        if (needs_mode(flags)) {                 \
            va_list list;                        \
            va_start(list, flags);               \
            bits = va_arg(list, mode_t);         \
            va_end(list);                        \
        }                                        \
        return opened(fd, name, flags, bits);    \
    }
OPEN(open, (const char *name, int flags, ...), AT_FDCWD)
OPEN(open64, (const char *name, int flags, ...), AT_FDCWD)
OPEN(openat, (int fd, const char *name, int flags, ...), fd)
OPEN(openat64, (int fd, const char *name, int flags, ...), fd)
int __open_2(const char *name, int flags) { return opened(AT_FDCWD, name, flags, 0); }
int __open64_2(const char *name, int flags) { return opened(AT_FDCWD, name, flags, 0); }
int __openat_2(int fd, const char *name, int flags) { return opened(fd, name, flags, 0); }
int __openat64_2(int fd, const char *name, int flags) { return opened(fd, name, flags, 0); }

/* Reads and writes: `half` is what a short or torn one does. */
#define TRANSFER(symbol, class, PARAMETERS, ARGUMENTS, HALF, size, note)    \
    ssize_t symbol PARAMETERS {                                              \
        static ssize_t(*real) PARAMETERS;                                    \
        if (!real) real = dlsym(RTLD_NEXT, #symbol);                         \
        char path[PATH_MAX];                                                 \
        if (!armed || !OF(fd)) return real ARGUMENTS;                        \
        ssize_t result = -1;                                                 \
        pthread_mutex_lock(&lock);                                           \
        int what = decide(class | (class == READ ? GETS : PUTS), #symbol, path); \
        int64_t at = lseek(fd, 0, SEEK_CUR);                                 \
        (void)at;                                                            \
        if (what == PASS) result = real ARGUMENTS;                           \
        else if ((what == SHORT || what == TORN) && (size) > 1) result = real HALF; \
        else if (what == SHORT || what == TORN) result = real ARGUMENTS;     \
        else errno = error_number;                                           \
        int saved = errno;                                                   \
        if (what == TORN) die();                                             \
        if (result > 0) { note; }                                            \
        pthread_mutex_unlock(&lock);                                         \
        errno = saved;                                                       \
        return result;                                                       \
    }

static size_t total(const struct iovec *parts, int count) {
    size_t sum = 0;
    for (int i = 0; i < count; i++) sum += parts[i].iov_len;
    return sum;
}

/* The data of a vector, as it was written. */
static void record_parts(int64_t at, const char *path, const struct iovec *parts, ssize_t written) {
    for (; written > 0; parts++) {
        size_t size = parts->iov_len < (size_t)written ? parts->iov_len : (size_t)written;
        record('w', at, path, 0, parts->iov_base, size);
        at += size, written -= size;
    }
}

TRANSFER(read, READ, (int fd, void *data, size_t size), (fd, data, size), (fd, data, size / 2), size, NOTHING)
TRANSFER(pread, READ, (int fd, void *data, size_t size, off_t from), (fd, data, size, from), (fd, data, size / 2, from),
         size, NOTHING)
TRANSFER(pread64, READ, (int fd, void *data, size_t size, off64_t from), (fd, data, size, from),
         (fd, data, size / 2, from), size, NOTHING)
TRANSFER(preadv, READ, (int fd, const struct iovec *parts, int count, off_t from), (fd, parts, count, from),
         (fd, parts, (count + 1) / 2, from), total(parts, count), NOTHING)
TRANSFER(preadv64, READ, (int fd, const struct iovec *parts, int count, off64_t from), (fd, parts, count, from),
         (fd, parts, (count + 1) / 2, from), total(parts, count), NOTHING)
TRANSFER(preadv64v2, READ, (int fd, const struct iovec *parts, int count, off64_t from, int flags),
         (fd, parts, count, from, flags), (fd, parts, (count + 1) / 2, from, flags), total(parts, count), NOTHING)
TRANSFER(write, WRITE, (int fd, const void *data, size_t size), (fd, data, size), (fd, data, size / 2), size,
         record('w', at, path, 0, data, result))
TRANSFER(pwrite, WRITE, (int fd, const void *data, size_t size, off_t to), (fd, data, size, to),
         (fd, data, size / 2, to), size, record('w', to, path, 0, data, result))
TRANSFER(pwrite64, WRITE, (int fd, const void *data, size_t size, off64_t to), (fd, data, size, to),
         (fd, data, size / 2, to), size, record('w', to, path, 0, data, result))
#define HALF_PARTS (fd, &(struct iovec){parts[0].iov_base, (parts[0].iov_len + 1) / 2}, 1)
TRANSFER(writev, WRITE, (int fd, const struct iovec *parts, int count), (fd, parts, count), HALF_PARTS,
         total(parts, count), record_parts(at, path, parts, result))
TRANSFER(pwritev, WRITE, (int fd, const struct iovec *parts, int count, off_t to), (fd, parts, count, to),
         (fd, &(struct iovec){parts[0].iov_base, (parts[0].iov_len + 1) / 2}, 1, to), total(parts, count),
         record_parts(to, path, parts, result))
