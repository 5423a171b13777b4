/* A preloaded library that makes chosen C library calls fail. The library does nothing until `faults_arm` is called.

   Only calls on paths or descriptors below one folder are counted, because Python and libraries also open other files.
   The counters are in memory that is shared with forked children. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* The kinds must be in the same order as in ONCE in failing_calls.py. */
enum { WRITE, SYNC, RENAME, MAP, OPEN, MKDIR, REMOVE, READ, CLOSE, LIST, LOCK, LINK, TRUNCATE, KINDS };
enum { SHORT = -1 };

struct control {
    int kind;      /* kind of call that fails; -1 counts calls without failing any */
    int error;     /* errno, or SHORT to read or write only part of the bytes */
    int forever;   /* whether all later calls of this kind fail too */
    long at;       /* index of the first call that fails, starting at 1 */
    long counts[KINDS];
    long failed;
    char path[PATH_MAX]; /* path of the first call that failed */
    char root[PATH_MAX];
};

static struct control *control;

static void *next(const char *name) { return dlsym(RTLD_NEXT, name); }

#define REAL(result, name, ...)                                                                                        \
    static result (*real)(__VA_ARGS__);                                                                                \
    if (!real) real = (result(*)(__VA_ARGS__))next(#name)

/* Count calls on paths below `root`, and make some fail; if `kind` is -1, only count. */
int faults_arm(const char *root, int kind, long at, int error, int forever) {
    REAL(void *, mmap, void *, size_t, int, int, int, off_t);
    if (!control) {
        void *shared = real(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (shared == MAP_FAILED) return -1;
        control = shared;
    }
    memset(control, 0, sizeof *control);
    control->kind = kind, control->at = at, control->error = error, control->forever = forever;
    strncpy(control->root, root, PATH_MAX - 1);
    return 0;
}

/* Pass all calls through again. Counters keep their values until the next `faults_arm`. */
void faults_disarm(void) {
    if (control) control->root[0] = 0;
}

long faults_count(int kind) { return control ? control->counts[kind] : 0; }
long faults_failed(void) { return control ? control->failed : 0; }
const char *faults_path(void) { return control ? control->path : ""; }

static int armed(void) { return control && control->root[0]; }

static int target_of(const char *link, char *out) {
    ssize_t size = readlink(link, out, PATH_MAX - 1);
    if (size < 0) return 0;
    out[size] = 0;
    return 1;
}

static int of_fd(int fd, char *out) {
    char link[64];
    if (fd < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    return target_of(link, out);
}

static int of_name(int folder, const char *name, char *out) {
    if (!name) return 0;
    if (name[0] == '/') {
        snprintf(out, PATH_MAX, "%s", name);
        return 1;
    }
    if (!(folder == AT_FDCWD ? target_of("/proc/self/cwd", out) : of_fd(folder, out))) return 0;
    size_t used = strlen(out);
    snprintf(out + used, PATH_MAX - used, "/%s", name);
    return 1;
}

/* Count this call if its path is below the root, and return whether it must fail. */
static int fails(int kind, const char *path) {
    size_t size = strlen(control->root);
    if (strncmp(path, control->root, size) || (path[size] && path[size] != '/')) return 0;
    long number = __atomic_add_fetch(&control->counts[kind], 1, __ATOMIC_SEQ_CST);
    if (kind != control->kind || number < control->at || (number > control->at && !control->forever)) return 0;
    if (__atomic_add_fetch(&control->failed, 1, __ATOMIC_SEQ_CST) == 1) strcpy(control->path, path);
    return 1;
}

static int fd_fails(int kind, int fd) {
    char path[PATH_MAX];
    int before = errno, result = armed() && of_fd(fd, path) && fails(kind, path);
    errno = before;
    return result;
}

static int name_fails(int kind, int folder, const char *name) {
    char path[PATH_MAX];
    int before = errno, result = armed() && of_name(folder, name, path) && fails(kind, path);
    errno = before;
    return result;
}

#define FAIL(value)                                                                                                    \
    do {                                                                                                               \
        errno = control->error;                                                                                        \
        return value;                                                                                                  \
    } while (0)

/* Return the number of bytes to transfer: about half for a short transfer, but at least one, because zero means end of
   file. */
static size_t some(size_t size) { return control->error == SHORT ? size / 2 + (size > 0) * (size < 2) : size; }

#define OPENING(name)                                                                                                  \
    int name(const char *path, int flags, ...) {                                                                       \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                        \
        va_end(rest);                                                                                                  \
        REAL(int, name, const char *, int, ...);                                                                       \
        if (name_fails(OPEN, AT_FDCWD, path)) FAIL(-1);                                                                \
        return real(path, flags, mode);                                                                                \
    }
OPENING(open)
OPENING(open64)

#define OPENING_AT(name)                                                                                               \
    int name(int folder, const char *path, int flags, ...) {                                                           \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                        \
        va_end(rest);                                                                                                  \
        REAL(int, name, int, const char *, int, ...);                                                                  \
        if (name_fails(OPEN, folder, path)) FAIL(-1);                                                                  \
        return real(folder, path, flags, mode);                                                                        \
    }
OPENING_AT(openat)
OPENING_AT(openat64)

#define STREAM(name)                                                                                                   \
    FILE *name(const char *path, const char *mode) {                                                                   \
        REAL(FILE *, name, const char *, const char *);                                                                \
        if (name_fails(OPEN, AT_FDCWD, path)) FAIL(NULL);                                                              \
        return real(path, mode);                                                                                       \
    }
STREAM(fopen)
STREAM(fopen64)

#define MOVING(kind, name, buffer)                                                                                     \
    ssize_t name(int fd, buffer data, size_t size) {                                                                   \
        REAL(ssize_t, name, int, buffer, size_t);                                                                      \
        if (fd_fails(kind, fd)) {                                                                                      \
            if (control->error != SHORT) FAIL(-1);                                                                     \
            size = some(size);                                                                                         \
        }                                                                                                              \
        return real(fd, data, size);                                                                                   \
    }
MOVING(READ, read, void *)
MOVING(WRITE, write, const void *)

#define MOVING_AT(kind, name, buffer)                                                                                  \
    ssize_t name(int fd, buffer data, size_t size, off_t at) {                                                         \
        REAL(ssize_t, name, int, buffer, size_t, off_t);                                                               \
        if (fd_fails(kind, fd)) {                                                                                      \
            if (control->error != SHORT) FAIL(-1);                                                                     \
            size = some(size);                                                                                         \
        }                                                                                                              \
        return real(fd, data, size, at);                                                                               \
    }
MOVING_AT(READ, pread, void *)
MOVING_AT(READ, pread64, void *)
MOVING_AT(WRITE, pwrite, const void *)
MOVING_AT(WRITE, pwrite64, const void *)

#define VECTOR(kind, name)                                                                                             \
    ssize_t name(int fd, const struct iovec *parts, int count) {                                                       \
        REAL(ssize_t, name, int, const struct iovec *, int);                                                           \
        if (fd_fails(kind, fd)) {                                                                                      \
            if (control->error != SHORT) FAIL(-1);                                                                     \
            count = (int)some((size_t)count);                                                                          \
        }                                                                                                              \
        return real(fd, parts, count);                                                                                 \
    }
VECTOR(READ, readv)
VECTOR(WRITE, writev)

ssize_t sendfile(int out, int in, off_t *at, size_t size) {
    REAL(ssize_t, sendfile, int, int, off_t *, size_t);
    if (fd_fails(WRITE, out)) {
        if (control->error != SHORT) FAIL(-1);
        size = some(size);
    }
    return real(out, in, at, size);
}

#define SYNCING(name)                                                                                                  \
    int name(int fd) {                                                                                                 \
        REAL(int, name, int);                                                                                          \
        if (fd_fails(SYNC, fd)) FAIL(-1);                                                                              \
        return real(fd);                                                                                               \
    }
SYNCING(fsync)
SYNCING(fdatasync)

int rename(const char *from, const char *to) {
    REAL(int, rename, const char *, const char *);
    if (name_fails(RENAME, AT_FDCWD, to)) FAIL(-1);
    return real(from, to);
}

int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    REAL(int, renameat, int, const char *, int, const char *);
    if (name_fails(RENAME, to_folder, to)) FAIL(-1);
    return real(from_folder, from, to_folder, to);
}

int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned int flags) {
    REAL(int, renameat2, int, const char *, int, const char *, unsigned int);
    if (name_fails(RENAME, to_folder, to)) FAIL(-1);
    return real(from_folder, from, to_folder, to, flags);
}

int link(const char *from, const char *to) {
    REAL(int, link, const char *, const char *);
    if (name_fails(LINK, AT_FDCWD, to)) FAIL(-1);
    return real(from, to);
}

int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
    REAL(int, linkat, int, const char *, int, const char *, int);
    if (name_fails(LINK, to_folder, to)) FAIL(-1);
    return real(from_folder, from, to_folder, to, flags);
}

#define MAPPING(name)                                                                                                  \
    void *name(void *place, size_t size, int access, int flags, int fd, off_t at) {                                    \
        REAL(void *, name, void *, size_t, int, int, int, off_t);                                                      \
        if (fd_fails(MAP, fd)) FAIL(MAP_FAILED);                                                                       \
        return real(place, size, access, flags, fd, at);                                                               \
    }
MAPPING(mmap)
MAPPING(mmap64)

#define CUTTING(name)                                                                                                  \
    int name(int fd, off_t size) {                                                                                     \
        REAL(int, name, int, off_t);                                                                                   \
        if (fd_fails(TRUNCATE, fd)) FAIL(-1);                                                                          \
        return real(fd, size);                                                                                         \
    }
CUTTING(ftruncate)
CUTTING(ftruncate64)

int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t);
    if (name_fails(MKDIR, AT_FDCWD, path)) FAIL(-1);
    return real(path, mode);
}

int mkdirat(int folder, const char *path, mode_t mode) {
    REAL(int, mkdirat, int, const char *, mode_t);
    if (name_fails(MKDIR, folder, path)) FAIL(-1);
    return real(folder, path, mode);
}

#define REMOVING(name)                                                                                                 \
    int name(const char *path) {                                                                                       \
        REAL(int, name, const char *);                                                                                 \
        if (name_fails(REMOVE, AT_FDCWD, path)) FAIL(-1);                                                              \
        return real(path);                                                                                             \
    }
REMOVING(unlink)
REMOVING(rmdir)

int unlinkat(int folder, const char *path, int flags) {
    REAL(int, unlinkat, int, const char *, int);
    if (name_fails(REMOVE, folder, path)) FAIL(-1);
    return real(folder, path, flags);
}

int close(int fd) {
    REAL(int, close, int);
    /* Close the file, but report an error, as network file systems do if an earlier write failed. */
    int failing = fd_fails(CLOSE, fd), result = real(fd);
    if (failing) FAIL(-1);
    return result;
}

int flock(int fd, int operation) {
    REAL(int, flock, int, int);
    if (fd_fails(LOCK, fd)) FAIL(-1);
    return real(fd, operation);
}

DIR *opendir(const char *path) {
    REAL(DIR *, opendir, const char *);
    if (name_fails(LIST, AT_FDCWD, path)) FAIL(NULL);
    return real(path);
}

DIR *fdopendir(int fd) {
    REAL(DIR *, fdopendir, int);
    if (fd_fails(LIST, fd)) FAIL(NULL);
    return real(fd);
}
