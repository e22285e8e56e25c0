/* stat, list and walk: what there is, as records. */
#include "tools.h"

#include <dirent.h>
#include <limits.h>

static struct {
	char *text;
	size_t length, room;
} path;

static void extend(const char *name) {
	size_t length = strlen(name);
	if (path.length + length + 2 > path.room)
		path.text = must(realloc(path.text, path.room = 2 * (path.length + length + 2)));
	memcpy(path.text + path.length, name, length + 1);
	path.length += length;
}

static void cut(size_t length) {
	path.length = length;
	path.text[length] = 0;
}

/* Takes the descriptor over. What vanishes meanwhile was not there. */
static void walk_directory(int fd, bool deep, visitor *visit) {
	DIR *directory = must(fdopendir(fd));
	size_t before = path.length;
	errno = 0;
	for (struct dirent *entry; (entry = readdir(directory)); errno = 0) {
		const char *name = entry->d_name;
		struct stat status;
		if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
			continue;
		extend(name);
		if (fstatat(fd, name, &status, AT_SYMLINK_NOFOLLOW) < 0) {
			if (!is_missing(errno))
				fail_with(path.text, errno);
		} else if (visit(fd, name, path.text, &status) && deep && S_ISDIR(status.st_mode)) {
			int inner = openat(fd, name, ONLY_DIRECTORY);
			if (inner < 0 && !is_missing(errno))
				fail_with(path.text, errno);
			extend("/");
			if (inner >= 0)
				walk_directory(inner, deep, visit);
		}
		cut(before);
	}
	if (errno)
		fail_with(path.length ? path.text : "", errno);
	closedir(directory);
}

void walk_tree(int root, bool deep, visitor *visit) {
	extend("");
	walk_directory(root, deep, visit);
}

static char letter_of(mode_t mode) {
	return S_ISREG(mode) ? 'f' : S_ISDIR(mode) ? 'd' : S_ISLNK(mode) ? 'l' : 'o';
}

static void put_record(char letter, const char *name, const char *target, const struct stat *status) {
	char head[160];
	int length = snprintf(head, sizeof head, "%c %o %lld %lld.%09ld %lld.%09ld %llu ", letter,
	                      (unsigned)status->st_mode & 07777, (long long)status->st_size,
	                      (long long)status->st_mtim.tv_sec, status->st_mtim.tv_nsec,
	                      (long long)status->st_ctim.tv_sec, status->st_ctim.tv_nsec,
	                      (unsigned long long)status->st_ino);
	put(head, (size_t)length);
	put(name, strlen(name) + 1);
	put(target, strlen(target) + 1);
}

static bool show(int directory, const char *name, const char *within, const struct stat *status) {
	char target[PATH_MAX];
	ssize_t length = 0;
	if (S_ISLNK(status->st_mode) && (length = readlinkat(directory, name, target, sizeof target - 1)) < 0)
		return false;
	target[length] = 0;
	/* A directory that we may not look into is no reason to tell nothing of the others. */
	bool closed = S_ISDIR(status->st_mode) && faccessat(directory, name, R_OK | X_OK, 0) < 0;
	put_record(closed ? 'D' : letter_of(status->st_mode), within, target, status);
	return !closed;
}

int tool_stat(char **arguments) {
	bool follow = arguments[0][0] == '1';
	struct stat status;
	if (fstatat(AT_FDCWD, arguments[1], &status, follow ? 0 : AT_SYMLINK_NOFOLLOW) < 0)
		fail_with("", errno);
	show(AT_FDCWD, arguments[1], arguments[1], &status);
	return 0;
}

int tool_list(char **arguments) {
	walk_tree(open_directory(arguments[0]), false, show);
	return 0;
}

int tool_walk(char **arguments) {
	walk_tree(open_directory(arguments[0]), true, show);
	return 0;
}
