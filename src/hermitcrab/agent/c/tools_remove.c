/* remove and remove-many. */
#include "tools.h"

#include <dirent.h>

static void remove_entry(int directory, const char *name, const char *path);

/* Takes the descriptor over. Returns whether anything was in it. */
static bool remove_content(int fd, const char *path) {
	DIR *directory = must(fdopendir(fd));
	bool any = false;
	for (struct dirent *entry; (entry = readdir(directory));)
		if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
			remove_entry(fd, entry->d_name, path);
			any = true;
		}
	closedir(directory);
	return any;
}

/* With all that is in it; what is not there is fine. `path` is what to call it. */
static void remove_entry(int directory, const char *name, const char *path) {
	if (unlinkat(directory, name, 0) == 0 || errno == ENOENT)
		return;
	int error = errno;
	struct stat status;
	if (fstatat(directory, name, &status, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISDIR(status.st_mode))
		fail(path, strerror(error));
	/* Again while there is something: some file systems skip entries when others are removed. */
	for (bool any = true; unlinkat(directory, name, AT_REMOVEDIR) < 0 && errno != ENOENT;) {
		if (errno != ENOTEMPTY || !any)
			fail(path, strerror(errno));
		int fd = openat(directory, name, ONLY_DIRECTORY);
		if (fd < 0)
			fail_with(path, errno);
		any = remove_content(fd, path);
	}
}

int tool_remove(char **arguments) {
	bool recursive = arguments[0][0] == '1', missing_ok = arguments[1][0] == '1';
	const char *path = arguments[2];
	struct stat status;
	if (lstat(path, &status) < 0) {
		if (missing_ok && (errno == ENOENT || errno == ENOTDIR))
			return 0;
		fail_with("", errno);
	}
	if (recursive)
		remove_entry(AT_FDCWD, path, "");
	else if (S_ISDIR(status.st_mode) ? rmdir(path) : unlink(path))
		fail("", strerror(errno));
	return 0;
}

int tool_remove_many(char **arguments) {
	int root = open_directory(arguments[0]);
	for (const char *name; (name = next_name());) {
		int parent = open_parent(root, name, false);
		if (parent >= 0)
			remove_entry(parent, last_part(name), name);
		else if (!is_missing(errno))
			fail_with(name, errno);
	}
	return 0;
}
