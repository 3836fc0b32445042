/* Makes chosen file operations of chosen processes fail, or end the process, for tests.

   Preloaded before the C library, so that it meets whatever writes: Python, HDF5, Arrow.
   What it does is in the environment:

   IOFAULT_UNDER   directories, separated by ':'; only what lies in them counts
   IOFAULT_ROLE    words of the process's command line; empty for every process
   IOFAULT_NOT     words that must not be in it
   IOFAULT_OPS     operations that count, separated by ',': open write fsync rename unlink link
                   mkdir read
   IOFAULT_PATH    shell pattern of the files that count, '*' is any text; empty for every file
   IOFAULT_AT      fires at the n-th of these operations in a process
   IOFAULT_ONCE    file that says it has fired, made by who fires first; without one it
                   fires at every operation from the n-th on
   IOFAULT_DO      'kill', 'kill-all' (the process group IOFAULT_GROUP), or an error number
   IOFAULT_LOG     file to which every operation that counts is appended: process, what, where

   Only opens that may write count. A fault comes before the operation.
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define LONGEST 4096

static int is_on;
static pid_t ready; /* a forked child is another process */
static long seen;
static __thread int inside;

static const char *setting(const char *name)
{
    const char *value = getenv(name);
    return value ? value : "";
}

static char command[1 << 16];

static int has_role(void)
{
    char *line = command;
    int file = REAL(open)("/proc/self/cmdline", O_RDONLY);
    ssize_t length = file < 0 ? 0 : REAL(read)(file, line, sizeof command - 1);
    if (file >= 0) REAL(close)(file);
    for (ssize_t i = 0; i < length; i++)
        if (!line[i] || line[i] == '\n') line[i] = ' ';
    line[length < 0 ? 0 : length] = 0;
    const char *without = setting("IOFAULT_NOT");
    return strstr(line, setting("IOFAULT_ROLE")) && !(*without && strstr(line, without));
}

static int is_under(const char *path)
{
    char places[LONGEST];
    snprintf(places, sizeof places, "%s", setting("IOFAULT_UNDER"));
    char *rest = NULL;
    for (char *place = strtok_r(places, ":", &rest); place; place = strtok_r(NULL, ":", &rest)) {
        size_t length = strlen(place);
        if (!strncmp(path, place, length) && (path[length] == '/' || !path[length])) return 1;
    }
    return 0;
}

static void absolute(int directory, const char *path, char *out)
{
    char base[LONGEST] = "", link[64];
    static const char open_files[] = "/proc/self/fd/";
    if (!strncmp(path, open_files, sizeof open_files - 1)) {
        char *rest = NULL;
        directory = (int)strtol(path + sizeof open_files - 1, &rest, 10);
        if (*rest == '/') path = rest + 1;
    }
    if (path[0] != '/') {
        if (directory == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) base[0] = 0;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
            ssize_t length = readlink(link, base, sizeof base - 1);
            base[length < 0 ? 0 : length] = 0;
        }
        snprintf(out, LONGEST, "%.2000s/%.2000s", base, path);
    } else {
        snprintf(out, LONGEST, "%s", path);
    }
}

static int counts(const char *op, const char *path)
{
    const char *pattern = setting("IOFAULT_PATH");
    if (*pattern && fnmatch(pattern, path, 0)) return 0;
    char ops[256];
    snprintf(ops, sizeof ops, "%s", setting("IOFAULT_OPS"));
    char *rest = NULL;
    for (char *one = strtok_r(ops, ",", &rest); one; one = strtok_r(NULL, ",", &rest))
        if (!strcmp(one, op)) return 1;
    return 0;
}

static int log_file = -1;

static void log_it(const char *op, const char *path)
{
    if (log_file < 0) return;
    char line[LONGEST + 64];
    int length = snprintf(line, sizeof line, "%d %s %.3900s\n", (int)getpid(), op, path);
    (void)!REAL(write)(log_file, line, (size_t)length);
}

/* Whether this operation is to fail; errno says how. */
static int fails(const char *op, const char *path)
{
    if (inside) return 0;
    inside = 1;
    if (ready != getpid()) {
        ready = getpid();
        seen = 0;
        is_on = *setting("IOFAULT_UNDER") && has_role();
        if (is_on && log_file < 0 && *setting("IOFAULT_LOG"))
            log_file = REAL(open)(setting("IOFAULT_LOG"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        log_it("start", command);
    }
    int result = 0;
    if (is_on && is_under(path) && counts(op, path)) {
        log_it(op, path);
        long number = __atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST), at = atol(setting("IOFAULT_AT"));
        const char *once = setting("IOFAULT_ONCE"), *what = setting("IOFAULT_DO");
        int fires = at > 0 && (*once ? number == at : number >= at);
        if (fires && *once) {
            int file = REAL(open)(once, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
            fires = file >= 0;
            if (fires) {
                (void)!REAL(write)(file, op, strlen(op));
                (void)!REAL(write)(file, " ", 1);
                (void)!REAL(write)(file, path, strlen(path));
                REAL(close)(file);
            }
        }
        if (fires && !strcmp(what, "kill-all")) kill(-(pid_t)atol(setting("IOFAULT_GROUP")), SIGKILL);
        if (fires && !strncmp(what, "kill", 4)) {
            kill(getpid(), SIGKILL);
            pause();
        }
        if (fires) {
            errno = atoi(what);
            result = 1;
        }
    }
    inside = 0;
    return result;
}

static int fails_at(const char *op, int directory, const char *path)
{
    if (inside || !path) return 0;
    int before = errno;
    char whole[LONGEST];
    absolute(directory, path, whole);
    int result = fails(op, whole);
    if (!result) errno = before;
    return result;
}

static int fails_on(const char *op, int file)
{
    if (inside || file < 0) return 0;
    int before = errno;
    char link[64], path[LONGEST];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    int result = path[0] == '/' && fails(op, path);
    if (!result) errno = before;
    return result;
}

static int writes(int flags)
{
    return (flags & O_ACCMODE) != O_RDONLY || flags & O_CREAT;
}

#define MODE(flags, last)                                     \
    mode_t mode = 0;                                          \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {                  \
        va_list list;                                         \
        va_start(list, last);                                 \
        mode = va_arg(list, mode_t);                          \
        va_end(list);                                         \
    }

int open(const char *path, int flags, ...)
{
    MODE(flags, flags)
    return writes(flags) && fails_at("open", AT_FDCWD, path) ? -1 : REAL(open)(path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
    MODE(flags, flags)
    return writes(flags) && fails_at("open", AT_FDCWD, path) ? -1 : REAL(open64)(path, flags, mode);
}

int openat(int directory, const char *path, int flags, ...)
{
    MODE(flags, flags)
    return writes(flags) && fails_at("open", directory, path) ? -1 : REAL(openat)(directory, path, flags, mode);
}

int openat64(int directory, const char *path, int flags, ...)
{
    MODE(flags, flags)
    return writes(flags) && fails_at("open", directory, path) ? -1 : REAL(openat64)(directory, path, flags, mode);
}

ssize_t write(int file, const void *data, size_t size)
{
    return fails_on("write", file) ? -1 : REAL(write)(file, data, size);
}

ssize_t writev(int file, const struct iovec *parts, int count)
{
    return fails_on("write", file) ? -1 : REAL(writev)(file, parts, count);
}

ssize_t pwrite(int file, const void *data, size_t size, off_t where)
{
    return fails_on("write", file) ? -1 : REAL(pwrite)(file, data, size, where);
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t where)
{
    return fails_on("write", file) ? -1 : REAL(pwrite64)(file, data, size, where);
}

ssize_t read(int file, void *data, size_t size)
{
    return fails_on("read", file) ? -1 : REAL(read)(file, data, size);
}

ssize_t readv(int file, const struct iovec *parts, int count)
{
    return fails_on("read", file) ? -1 : REAL(readv)(file, parts, count);
}

ssize_t pread64(int file, void *data, size_t size, off64_t where)
{
    return fails_on("read", file) ? -1 : REAL(pread64)(file, data, size, where);
}

ssize_t preadv64(int file, const struct iovec *parts, int count, off64_t where)
{
    return fails_on("read", file) ? -1 : REAL(preadv64)(file, parts, count, where);
}

int fsync(int file)
{
    return fails_on("fsync", file) ? -1 : REAL(fsync)(file);
}

int fdatasync(int file)
{
    return fails_on("fsync", file) ? -1 : REAL(fdatasync)(file);
}

int rename(const char *from, const char *to)
{
    return fails_at("rename", AT_FDCWD, to) ? -1 : REAL(rename)(from, to);
}

int renameat(int from_directory, const char *from, int to_directory, const char *to)
{
    return fails_at("rename", to_directory, to) ? -1 : REAL(renameat)(from_directory, from, to_directory, to);
}

int renameat2(int from_directory, const char *from, int to_directory, const char *to, unsigned flags)
{
    return fails_at("rename", to_directory, to) ? -1
                                                : REAL(renameat2)(from_directory, from, to_directory, to, flags);
}

int unlink(const char *path)
{
    return fails_at("unlink", AT_FDCWD, path) ? -1 : REAL(unlink)(path);
}

int unlinkat(int directory, const char *path, int flags)
{
    return fails_at("unlink", directory, path) ? -1 : REAL(unlinkat)(directory, path, flags);
}

int link(const char *from, const char *to)
{
    return fails_at("link", AT_FDCWD, to) ? -1 : REAL(link)(from, to);
}

int linkat(int from_directory, const char *from, int to_directory, const char *to, int flags)
{
    return fails_at("link", to_directory, to) ? -1 : REAL(linkat)(from_directory, from, to_directory, to, flags);
}

int mkdir(const char *path, mode_t mode)
{
    return fails_at("mkdir", AT_FDCWD, path) ? -1 : REAL(mkdir)(path, mode);
}
