/*
 * unpack: a tar archive into a tree. Each file is staged beside its place and takes it in one step; no link
 * is followed on the way. Taken is what ../../files/tar.py writes and nothing else.
 */
#include "tools.h"

#include <limits.h>
#include <sys/random.h>

enum { AT_NAME = 0, AT_MODE = 100, AT_UID = 108, AT_GID = 116, AT_SIZE = 124, AT_MTIME = 136, AT_SUM = 148,
       AT_TYPE = 156, AT_LINK = 157, AT_MAGIC = 257, AT_PREFIX = 345, AT_NANO = 500 };
enum { LARGEST_EXTRA = 64 << 10 };

struct entry {
	char type;
	char path[PATH_MAX], target[PATH_MAX];
	uint64_t size;
	mode_t mode;
	uid_t uid;
	gid_t gid;
	struct timespec times[2];
};

/* A directory whose mode comes when all is in it. They are within each other, so these are few. */
struct unfinished {
	struct unfinished *outer;
	mode_t mode;
	uid_t uid;
	gid_t gid;
	struct timespec times[2];
	size_t length;
	char path[];
};

static int root;
static bool owners;
static struct unfinished *unfinished;
static struct {
	volatile sig_atomic_t directory; /* -1 when there is none */
	char name[40];
} staged = {.directory = -1};

static void drop_staged(void) {
	if (staged.directory >= 0)
		unlinkat(staged.directory, staged.name, 0);
	staged.directory = -1;
}

static void on_end(int number) {
	drop_staged();
	_exit(128 + number);
}

static _Noreturn void malformed(void) { fail("", "the archive makes no sense"); }

static void need_input(void *bytes, size_t length) {
	if (read_input(bytes, length) < length)
		fail("", "the archive is cut off");
}

static uint64_t octal(const uint8_t *field, size_t length) {
	uint64_t value = 0;
	for (size_t i = 0; i < length && field[i] && field[i] != ' '; i++) {
		if (field[i] < '0' || field[i] > '7')
			malformed();
		value = value << 3 | (uint64_t)(field[i] - '0');
	}
	return value;
}

static uint64_t decimal(const char *text, size_t length) {
	uint64_t value = 0;
	if (!length || length > 18)
		malformed();
	for (size_t i = 0; i < length; i++) {
		if (text[i] < '0' || text[i] > '9')
			malformed();
		value = value * 10 + (uint64_t)(text[i] - '0');
	}
	return value;
}

static void copy_text(char to[PATH_MAX], const char *text, size_t length) {
	if (memchr(text, 0, length))
		malformed();
	if (length >= PATH_MAX)
		fail("a name", strerror(ENAMETOOLONG));
	memcpy(to, text, length);
	to[length] = 0;
}

/* What the header before an entry says, in place of the entry's own fields. */
struct extra {
	char path[PATH_MAX], target[PATH_MAX];
	bool sized, owned, grouped;
	uint64_t size, uid, gid;
};

static void take_record(struct extra *extra, const char *key, size_t key_length, const char *value, size_t length) {
	if (key_length == 4 && memcmp(key, "path", 4) == 0) {
		copy_text(extra->path, value, length);
	} else if (key_length == 8 && memcmp(key, "linkpath", 8) == 0) {
		copy_text(extra->target, value, length);
	} else if (key_length == 4 && memcmp(key, "size", 4) == 0) {
		extra->sized = true;
		extra->size = decimal(value, length);
	} else if (key_length == 3 && memcmp(key, "uid", 3) == 0) {
		extra->owned = true;
		extra->uid = decimal(value, length);
	} else if (key_length == 3 && memcmp(key, "gid", 3) == 0) {
		extra->grouped = true;
		extra->gid = decimal(value, length);
	} else {
		malformed();
	}
}

static void read_extra(struct extra *extra, uint64_t size) {
	static char body[LARGEST_EXTRA + BLOCK];
	if (size > LARGEST_EXTRA)
		malformed();
	need_input(body, (size_t)((size + BLOCK - 1) / BLOCK * BLOCK));
	for (const char *at = body, *end = body + size; at < end;) {
		size_t left = (size_t)(end - at);
		const char *space = memchr(at, ' ', left);
		uint64_t length = space ? decimal(at, (size_t)(space - at)) : 0;
		if (length > left || length < (uint64_t)(space - at) + 3 || at[length - 1] != '\n')
			malformed();
		const char *key = space + 1, *last = at + length - 1, *equals = memchr(key, '=', (size_t)(last - key));
		if (!equals)
			malformed();
		take_record(extra, key, (size_t)(equals - key), equals + 1, (size_t)(last - equals - 1));
		at += length;
	}
}

static void check_sum(const uint8_t block[BLOCK]) {
	unsigned sum = 8 * ' ';
	for (size_t i = 0; i < BLOCK; i++)
		sum += i < AT_SUM || i >= AT_SUM + 8 ? block[i] : 0;
	if (sum != octal(block + AT_SUM, 8) || memcmp(block + AT_MAGIC, "ustar", 6) != 0)
		malformed();
}

static void name_entry(struct entry *entry, const uint8_t block[BLOCK], const struct extra *extra) {
	const char *name = (const char *)block + AT_NAME, *prefix = (const char *)block + AT_PREFIX;
	if (*extra->path)
		memcpy(entry->path, extra->path, PATH_MAX);
	else if (*prefix)
		snprintf(entry->path, PATH_MAX, "%.155s/%.100s", prefix, name);
	else
		snprintf(entry->path, PATH_MAX, "%.100s", name);
	if (*extra->target)
		memcpy(entry->target, extra->target, PATH_MAX);
	else
		snprintf(entry->target, PATH_MAX, "%.100s", (const char *)block + AT_LINK);
	size_t length = strlen(entry->path);
	if (entry->type == '5' && length && entry->path[length - 1] == '/')
		entry->path[length - 1] = 0;
	bool is_root = entry->type == '5' && strcmp(entry->path, ".") == 0;
	if (!is_root && !is_within(entry->path))
		fail(entry->path, "it leaves the directory");
}

static void understand(struct entry *entry, const uint8_t block[BLOCK], const struct extra *extra) {
	entry->type = (char)block[AT_TYPE];
	name_entry(entry, block, extra);
	entry->size = extra->sized ? extra->size : octal(block + AT_SIZE, 12);
	entry->mode = octal(block + AT_MODE, 8) & 07777;
	entry->uid = (uid_t)(extra->owned ? extra->uid : octal(block + AT_UID, 8));
	entry->gid = (gid_t)(extra->grouped ? extra->gid : octal(block + AT_GID, 8));
	struct timespec time = {.tv_sec = (time_t)octal(block + AT_MTIME, 12)};
	if (memcmp(block + AT_NANO, "hc", 2) == 0)
		time.tv_nsec = (long)decimal((const char *)block + AT_NANO + 2, 9);
	entry->times[0] = entry->times[1] = time;
	if (entry->size && entry->type != '0')
		malformed();
}

/* Returns whether there is another one. */
static bool next_entry(struct entry *entry) {
	static struct extra extra;
	uint8_t block[BLOCK];
	extra.path[0] = extra.target[0] = 0;
	extra.sized = extra.owned = extra.grouped = false;
	for (;;) {
		need_input(block, BLOCK);
		if (!*block)
			return false;
		check_sum(block);
		if (block[AT_TYPE] != 'x')
			break;
		read_extra(&extra, octal(block + AT_SIZE, 12));
	}
	understand(entry, block, &extra);
	return true;
}

static int parent_of(const char *path) {
	int parent = open_parent(root, path, true);
	if (parent < 0)
		fail_with(path, errno);
	return parent;
}

/* A name beside the entry's own, for what will become it. */
static const char *stage(int parent) {
	uint64_t chance = 0;
	if (getrandom(&chance, sizeof chance, GRND_NONBLOCK) < 0)
		chance = (uint64_t)now_ns();
	snprintf(staged.name, sizeof staged.name, ".hermitcrab-%016llx", (unsigned long long)chance);
	staged.directory = parent;
	return staged.name;
}

static void put_in_place(const struct entry *entry) {
	int parent = staged.directory;
	if (renameat(parent, staged.name, parent, last_part(entry->path)) < 0)
		fail(entry->path, errno == EISDIR ? "in its place is a directory" : strerror(errno));
	drop_staged(); /* still there when both are the same file */
}

static void write_file(int fd, const uint8_t *bytes, size_t length, const char *path) {
	while (length) {
		ssize_t n = write(fd, bytes, length);
		if (n < 0 && errno != EINTR)
			fail_with(path, errno);
		bytes += n > 0 ? n : 0;
		length -= n > 0 ? (size_t)n : 0;
	}
}

/* Not everybody may give files away. */
static bool is_allowed(int result) { return result == 0 || errno == EPERM || errno == EINVAL; }

/* The mode after the owner, a change of which clears bits. */
static void give_attributes(int fd, const char *path, mode_t mode, uid_t uid, gid_t gid,
                            const struct timespec times[2]) {
	if ((owners && !is_allowed(fchown(fd, uid, gid))) || fchmod(fd, mode) < 0)
		fail_with(path, errno);
	futimens(fd, times);
}

static void make_file(const struct entry *entry) {
	static uint8_t bytes[IO_CHUNK];
	int parent = parent_of(entry->path);
	int fd = openat(parent, stage(parent), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (fd < 0)
		fail_with(entry->path, errno);
	for (uint64_t left = entry->size; left;) {
		size_t n = left < sizeof bytes ? (size_t)left : sizeof bytes;
		need_input(bytes, n);
		write_file(fd, bytes, n, entry->path);
		left -= n;
	}
	need_input(bytes, (size_t)(-entry->size % BLOCK));
	give_attributes(fd, entry->path, entry->mode, entry->uid, entry->gid, entry->times);
	if (close(fd) < 0)
		fail_with(entry->path, errno);
	put_in_place(entry);
}

static void make_link(const struct entry *entry) {
	int parent = parent_of(entry->path);
	if (symlinkat(entry->target, parent, stage(parent)) < 0)
		fail_with(entry->path, errno);
	if (owners && !is_allowed(fchownat(parent, staged.name, entry->uid, entry->gid, AT_SYMLINK_NOFOLLOW)))
		fail_with(entry->path, errno);
	utimensat(parent, staged.name, entry->times, AT_SYMLINK_NOFOLLOW);
	put_in_place(entry);
}

static void make_hard_link(const struct entry *entry) {
	struct stat status;
	if (!is_within(entry->target))
		fail(entry->target, "it leaves the directory");
	int first = open_parent(root, entry->target, false);
	if (first < 0 || (first = fcntl(first, F_DUPFD_CLOEXEC, 0)) < 0 ||
	    fstatat(first, last_part(entry->target), &status, AT_SYMLINK_NOFOLLOW) < 0)
		fail_with(entry->target, errno);
	if (!S_ISREG(status.st_mode))
		fail(entry->target, "Not a regular file");
	int parent = parent_of(entry->path);
	if (linkat(first, last_part(entry->target), parent, stage(parent), 0) < 0)
		fail_with(entry->path, errno);
	close(first);
	put_in_place(entry);
}

static void make_directory(const struct entry *entry) {
	struct stat status;
	int parent = parent_of(entry->path);
	const char *name = last_part(entry->path);
	if (mkdirat(parent, name, entry->mode | 0700) < 0) {
		int error = errno;
		if (error != EEXIST || fstatat(parent, name, &status, AT_SYMLINK_NOFOLLOW) < 0)
			fail_with(entry->path, error);
		if (!S_ISDIR(status.st_mode))
			fail(entry->path, "in its place is no directory");
		if ((status.st_mode & 0700) != 0700)
			fchmodat(parent, name, status.st_mode | 0700, AT_SYMLINK_NOFOLLOW); /* else it shows soon enough */
	}
	size_t length = strlen(entry->path);
	struct unfinished *new = must(malloc(sizeof *new + length + 1));
	*new = (struct unfinished){unfinished, entry->mode, entry->uid, entry->gid, {entry->times[0], entry->times[1]}, length};
	memcpy(new->path, entry->path, length + 1);
	unfinished = new;
}

static void finish_directory(void) {
	struct unfinished *last = unfinished;
	int fd = openat(parent_of(last->path), last_part(last->path), ONLY_DIRECTORY);
	if (fd < 0)
		fail_with(last->path, errno);
	give_attributes(fd, last->path, last->mode, last->uid, last->gid, last->times);
	close(fd);
	unfinished = last->outer;
	free(last);
}

/* Those that the path is not in: an archive is written directory by directory. */
static void finish_directories(const char *path) {
	while (unfinished &&
	       !(strncmp(path, unfinished->path, unfinished->length) == 0 && path[unfinished->length] == '/'))
		finish_directory();
}

static void take(const struct entry *entry) {
	switch (entry->type) {
	case '0':
		make_file(entry);
		break;
	case '1':
		make_hard_link(entry);
		break;
	case '2':
		make_link(entry);
		break;
	case '5':
		make_directory(entry);
		break;
	default:
		malformed();
	}
}

static void set_handlers(void) {
	static const int ends[] = {SIGTERM, SIGINT, SIGHUP};
	for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
		signal(ends[i], on_end);
	atexit(drop_staged);
}

int tool_unpack(char **arguments) {
	static struct entry entry;
	owners = arguments[0][0] == '1';
	char *path = arguments[1];
	bool new = make_directories(path, 0777);
	int error = errno;
	root = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (root < 0)
		fail("", strerror(errno == ENOENT && !new ? error : errno));
	set_handlers();
	int root_mode = -1;
	while (next_entry(&entry)) {
		finish_directories(entry.path);
		if (strcmp(entry.path, ".") == 0)
			root_mode = new ? (int)entry.mode : -1; /* of a directory that was there nothing changes */
		else
			take(&entry);
	}
	finish_directories("");
	if (root_mode >= 0 && fchmod(root, (mode_t)root_mode) < 0)
		fail_with("", errno);
	return 0;
}
