/* What the file tools share, and which there are. */
#include "tools.h"

#include <limits.h>

static struct {
	uint8_t bytes[64 << 10];
	size_t length;
} output;

static struct {
	uint8_t bytes[IO_CHUNK];
	size_t at, end;
} input;

/* An empty path for the one that the tool was given: who started it knows. */
void fail(const char *path, const char *why) {
	fprintf(stderr, "%s%s%s", path, *path ? ": " : "", why);
	exit(FAILED);
}

void fail_with(const char *path, int error) {
	if (!*path && (error == ENOENT || error == ENOTDIR)) {
		fputs(strerror(error), stderr);
		exit(NOT_THERE);
	}
	fail(path, error == EMFILE ? "too many directories within each other" : strerror(error));
}

static void write_all(const uint8_t *bytes, size_t length) {
	while (length) {
		ssize_t n = write(1, bytes, length);
		if (n < 0 && errno != EINTR)
			exit(FAILED); /* nobody reads: nobody to tell */
		bytes += n > 0 ? n : 0;
		length -= n > 0 ? (size_t)n : 0;
	}
}

void flush_output(void) {
	write_all(output.bytes, output.length);
	output.length = 0;
}

void put(const void *bytes, size_t length) {
	if (output.length + length > sizeof output.bytes)
		flush_output();
	if (length > sizeof output.bytes) {
		write_all(bytes, length);
		return;
	}
	memcpy(output.bytes + output.length, bytes, length);
	output.length += length;
}

/* Returns less than `length` only at the end. */
static size_t fill_input(void) {
	ssize_t n;
	do
		n = read(0, input.bytes, sizeof input.bytes);
	while (n < 0 && errno == EINTR);
	if (n < 0)
		fail("", strerror(errno));
	input.at = 0;
	return input.end = (size_t)n;
}

size_t read_input(void *bytes, size_t length) {
	size_t done = 0;
	while (done < length && (input.at < input.end || fill_input())) {
		size_t n = smaller(length - done, input.end - input.at);
		memcpy((uint8_t *)bytes + done, input.bytes + input.at, n);
		input.at += n;
		done += n;
	}
	return done;
}

/* The next of the names that came on stdin, each ended by a NUL; NULL after the last. */
const char *next_name(void) {
	static char name[PATH_MAX];
	for (size_t length = 0; length < sizeof name; length++) {
		if (!read_input(name + length, 1)) {
			if (length)
				fail("", "the list of names is cut off");
			return NULL;
		}
		if (!name[length]) {
			if (!is_within(name))
				fail(name, "not a path within the directory");
			return name;
		}
	}
	fail("a name", strerror(ENAMETOOLONG));
}

/* Whether it is relative and has no empty part, no `.` and no `..`. */
bool is_within(const char *path) {
	for (;;) {
		size_t length = strcspn(path, "/");
		if (!length || (length == 1 && path[0] == '.') || (length == 2 && path[0] == '.' && path[1] == '.'))
			return false;
		if (!path[length])
			return true;
		path += length + 1;
	}
}

const char *last_part(const char *path) {
	const char *slash = strrchr(path, '/');
	return slash ? slash + 1 : path;
}

/* The one that the tool was given: links in its path are followed. */
int open_directory(const char *path) {
	int fd = open(path, O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_CLOEXEC);
	if (fd < 0 && errno == ENOTDIR && access(path, F_OK) == 0)
		fail("", "Not a directory");
	if (fd < 0)
		fail_with("", errno);
	return fd;
}

/* All of them on the way, and the last with that mode. Returns whether the last is new; else errno says why not. */
bool make_directories(char *path, mode_t mode) {
	for (char *slash = path; (slash = strchr(slash + 1, '/'));) {
		*slash = 0;
		mkdir(path, 0777); /* what cannot be made shows in the end */
		*slash = '/';
	}
	return mkdir(path, mode) == 0;
}

/*
 * The directory that an entry of the tree is in, by way of no link. Kept open for the next one, which is often
 * the same. Returns -1 with errno; `make` makes what is missing.
 */
int open_parent(int root, const char *path, bool make) {
	static char known[PATH_MAX];
	static int fd = -1;
	size_t length = (size_t)(last_part(path) - path);
	if (!length)
		return root;
	if (length >= sizeof known) {
		errno = ENAMETOOLONG;
		return -1;
	}
	if (fd >= 0 && strlen(known) == length && memcmp(known, path, length) == 0)
		return fd;
	close_fd(&fd);
	int at = root;
	memcpy(known, path, length);
	known[length] = 0;
	for (char *part = known, *slash; (slash = strchr(part, '/')); part = slash + 1) {
		*slash = 0;
		if (make)
			mkdirat(at, part, 0777);
		int next = openat(at, part, ONLY_DIRECTORY);
		int error = errno == ELOOP ? ENOTDIR : errno;
		*slash = '/';
		if (at != root)
			close(at);
		if (next < 0) {
			errno = error;
			return -1;
		}
		at = next;
	}
	return fd = at;
}

static int tool_mkdir(char **arguments) {
	char *path = arguments[2];
	struct stat status;
	bool parents = arguments[1][0] == '1';
	if (parents ? make_directories(path, 0777) : mkdir(path, 0777) == 0) {
		if (*arguments[0] && chmod(path, (mode_t)strtoul(arguments[0], NULL, 8)) < 0)
			fail_with("", errno);
		return 0;
	}
	int error = errno;
	if (error != EEXIST || !parents || stat(path, &status) < 0 || !S_ISDIR(status.st_mode))
		fail("", strerror(error));
	return 0;
}

static const struct tool {
	const char *verb;
	int arguments;
	bool more; /* or any number beyond that */
	int (*run)(char **arguments);
} tools[] = {
	{"stat", 2, false, tool_stat},
	{"list", 1, false, tool_list},
	{"walk", 1, false, tool_walk},
	{"mkdir", 3, false, tool_mkdir},
	{"remove", 3, false, tool_remove},
	{"remove-many", 1, false, tool_remove_many},
	{"pack", 2, true, tool_pack},
	{"unpack", 2, false, tool_unpack},
};

/* A directory within a directory within ... is open at every step. */
static void take_all_descriptors(void) {
	struct rlimit limit;
	if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
		limit.rlim_cur = limit.rlim_max;
		setrlimit(RLIMIT_NOFILE, &limit);
	}
}

int run_tool(int count, char **arguments) {
	for (size_t i = 0; i < sizeof tools / sizeof *tools; i++)
		if (strcmp(arguments[0], tools[i].verb) == 0 &&
		    (count - 1 == tools[i].arguments || (tools[i].more && count - 1 > tools[i].arguments))) {
			take_all_descriptors();
			fcntl(0, F_SETPIPE_SZ, BIG_PIPE); /* no pipe, no harm */
			fcntl(1, F_SETPIPE_SZ, BIG_PIPE);
			int status = tools[i].run(arguments + 1);
			flush_output();
			return status;
		}
	fputs("no such file tool", stderr);
	return MISUSED;
}
