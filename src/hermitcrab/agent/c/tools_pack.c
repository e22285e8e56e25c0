/* pack: a tree, or some of its entries, as a tar archive. ../../files/tar.py says how it is written. */
#include "tools.h"

#include <limits.h>

/* Fields of a header: where, and of which length. */
enum { AT_NAME = 0, AT_MODE = 100, AT_UID = 108, AT_GID = 116, AT_SIZE = 124, AT_MTIME = 136, AT_SUM = 148,
       AT_TYPE = 156, AT_LINK = 157, AT_MAGIC = 257, AT_PREFIX = 345, AT_NANO = 500 };
enum { NAME_ROOM = 100, PREFIX_ROOM = 155 };
#define LARGEST_OCTAL UINT64_C(077777777777)
#define LARGEST_ID 07777777U

static char **excluded;
static bool named; /* those that were asked for, as far as they are there and may be read */
static bool told;  /* of what cannot be packed, once */

static bool is_left_out(int error) { return is_missing(error) || (named && error == EACCES); }

static void put_padding(uint64_t size) {
	static const uint8_t zeros[BLOCK];
	put(zeros, (size_t)(-size % BLOCK));
}

static void put_block(uint8_t block[BLOCK]) {
	unsigned sum = 0;
	memset(block + AT_SUM, ' ', 8);
	for (size_t i = 0; i < BLOCK; i++)
		sum += block[i];
	snprintf((char *)block + AT_SUM, 7, "%06o", sum);
	put(block, BLOCK);
}

static void set_octal(uint8_t *field, int digits, uint64_t value) {
	snprintf((char *)field, (size_t)digits + 1, "%0*llo", digits, (unsigned long long)value);
}

/* `key=value` with its own length before it, which counts its own digits. */
static void add_record(char **extra, size_t *length, const char *key, const char *value) {
	size_t bare = strlen(key) + strlen(value) + 3, whole = bare + 1;
	char digits[24];
	while (whole != bare + (size_t)snprintf(digits, sizeof digits, "%zu", whole))
		whole = bare + strlen(digits);
	*extra = must(realloc(*extra, *length + whole + 1));
	*length += (size_t)sprintf(*extra + *length, "%s %s=%s\n", digits, key, value);
}

static void add_number(char **extra, size_t *length, const char *key, uint64_t value) {
	char text[24];
	snprintf(text, sizeof text, "%llu", (unsigned long long)value);
	add_record(extra, length, key, text);
}

/* Where ustar would cut the path in two; 0 when it fits as it is, -1 when it does not fit at all. */
static long cut_of(const char *path, size_t length) {
	if (length <= NAME_ROOM)
		return 0;
	const char *slash = strchr(path + length - NAME_ROOM - 1, '/');
	return slash && slash != path && slash - path <= PREFIX_ROOM && slash[1] ? slash - path : -1;
}

static void put_extra(const char *path, long cut, const char *target, uint64_t size, const struct stat *status) {
	char *extra = NULL;
	size_t length = 0;
	if (cut < 0)
		add_record(&extra, &length, "path", path);
	if (strlen(target) > NAME_ROOM)
		add_record(&extra, &length, "linkpath", target);
	if (size > LARGEST_OCTAL)
		add_number(&extra, &length, "size", size);
	if (status->st_uid > LARGEST_ID)
		add_number(&extra, &length, "uid", status->st_uid);
	if (status->st_gid > LARGEST_ID)
		add_number(&extra, &length, "gid", status->st_gid);
	if (!length)
		return;
	uint8_t block[BLOCK] = "pax";
	set_octal(block + AT_MODE, 7, 0600);
	set_octal(block + AT_SIZE, 11, length);
	memcpy(block + AT_MAGIC, "ustar\00000", 8);
	block[AT_TYPE] = 'x';
	put_block(block);
	put(extra, length);
	put_padding(length);
	free(extra);
}

static void put_header(const char *path, char type, const char *target, uint64_t size, const struct stat *status) {
	size_t length = strlen(path);
	long cut = cut_of(path, length);
	put_extra(path, cut, target, size, status);
	uint8_t block[BLOCK] = {0};
	const char *name = cut > 0 ? path + cut + 1 : path;
	memcpy(block + AT_NAME, name, strnlen(name, NAME_ROOM));
	if (cut > 0)
		memcpy(block + AT_PREFIX, path, (size_t)cut);
	memcpy(block + AT_LINK, target, strnlen(target, NAME_ROOM));
	int64_t seconds = status->st_mtim.tv_sec;
	bool sane = seconds >= 0 && (uint64_t)seconds <= LARGEST_OCTAL;
	set_octal(block + AT_MODE, 7, status->st_mode & 07777);
	set_octal(block + AT_UID, 7, status->st_uid > LARGEST_ID ? 0 : status->st_uid);
	set_octal(block + AT_GID, 7, status->st_gid > LARGEST_ID ? 0 : status->st_gid);
	set_octal(block + AT_SIZE, 11, size > LARGEST_OCTAL ? 0 : size);
	set_octal(block + AT_MTIME, 11, sane ? (uint64_t)seconds : 0);
	memcpy(block + AT_MAGIC, "ustar\00000", 8);
	snprintf((char *)block + AT_NANO, 12, "hc%09ld", sane ? status->st_mtim.tv_nsec : 0);
	block[AT_TYPE] = (uint8_t)type;
	put_block(block);
}

/* Returns less than asked for only at the end of the file. */
static size_t read_file(int fd, uint8_t *bytes, size_t length, const char *path) {
	size_t done = 0;
	while (done < length) {
		ssize_t n = read(fd, bytes + done, length - done);
		if (n == 0)
			break;
		if (n < 0 && errno != EINTR)
			fail_with(path, errno);
		done += n > 0 ? (size_t)n : 0;
	}
	return done;
}

static void pack_file(int directory, const char *name, const char *path) {
	static uint8_t bytes[IO_CHUNK];
	struct stat status;
	int fd = openat(directory, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	if (fd < 0 && is_left_out(errno))
		return;
	if (fd < 0 || fstat(fd, &status) < 0)
		fail_with(path, errno);
	if (!S_ISREG(status.st_mode)) {
		close(fd);
		return;
	}
	/* A small file is read before its size is told, so that it may change under us. */
	size_t n = read_file(fd, bytes, sizeof bytes, path);
	uint64_t size = n, left;
	if (n == sizeof bytes && (uint64_t)status.st_size > size)
		size = (uint64_t)status.st_size;
	put_header(path, '0', "", size, &status);
	put(bytes, n);
	for (left = size - n; left; left -= n) {
		n = read_file(fd, bytes, (size_t)(left < sizeof bytes ? left : sizeof bytes), path);
		if (!n)
			fail(path, "it shrank while it was read");
		put(bytes, n);
	}
	put_padding(size);
	close(fd);
}

static bool is_excluded(const char *path) {
	for (char **each = excluded; *each; each++)
		if (strcmp(*each, path) == 0)
			return true;
	return false;
}

static void put_directory(const char *path, const struct stat *status) {
	size_t length = strlen(path);
	char *with_slash = must(malloc(length + 2));
	memcpy(with_slash, path, length);
	memcpy(with_slash + length, "/", 2);
	put_header(with_slash, '5', "", 0, status);
	free(with_slash);
}

static bool pack_entry(int directory, const char *name, const char *path, const struct stat *status) {
	char target[PATH_MAX];
	ssize_t length;
	if (is_excluded(path))
		return false;
	if (S_ISREG(status->st_mode)) {
		pack_file(directory, name, path);
	} else if (S_ISDIR(status->st_mode)) {
		put_directory(path, status);
	} else if (S_ISLNK(status->st_mode)) {
		if ((length = readlinkat(directory, name, target, sizeof target - 1)) < 0)
			return false;
		target[length] = 0;
		put_header(path, '2', target, 0, status);
	} else if (!told) {
		told = true;
		fprintf(stderr, "%s is no file, directory or link: left out", path);
	}
	return true;
}

static void pack_names(int root) {
	for (const char *name; (name = next_name());) {
		struct stat status;
		int parent = open_parent(root, name, false);
		if (parent >= 0 && fstatat(parent, last_part(name), &status, AT_SYMLINK_NOFOLLOW) == 0)
			pack_entry(parent, last_part(name), name, &status);
		else if (!is_left_out(errno))
			fail_with(name, errno);
	}
}

int tool_pack(char **arguments) {
	static const uint8_t end[2 * BLOCK];
	int root = open_directory(arguments[1]);
	excluded = arguments + 2;
	struct stat status;
	named = arguments[0][0] == '1';
	if (named) {
		pack_names(root);
	} else {
		if (fstat(root, &status) < 0)
			fail_with("", errno);
		put_header("./", '5', "", 0, &status);
		walk_tree(root, true, pack_entry);
	}
	put(end, sizeof end);
	return 0;
}
