/*
 * READ and WRITE: execs without a process. What is written is staged beside the file and takes its place
 * in one step, so that nobody ever sees half of it.
 */
#include "agent.h"

#include <limits.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>

/* One more than the kernel takes, so that what is too long for it stays too long. */
enum { PATH_ROOM = PATH_MAX + 1 };
enum { NOT_REGULAR = -1, MAX_LINKS = 40, COPY_CHUNK = 64 << 10 };

struct upload {
	uint32_t mode; /* 0: as it was, or what the umask leaves */
	bool replaces; /* a file that is there, owned as follows */
	uid_t owner;
	gid_t group;
	uint32_t old_mode;
	enum { UNNAMED, NAMED, ELSEWHERE } staging;
	char path[PATH_ROOM], temporary[PATH_ROOM + 32];
};

/* `error` is an errno, NOT_REGULAR, or 0. */
static void end_transfer(struct exec *exec, int error) {
	struct ending *ending = &exec->ending;
	if (error) {
		ending->cause = CAUSE_NOT_STARTED;
		ending->code = error == NOT_REGULAR ? EINVAL : error;
		snprintf(ending->reason, sizeof ending->reason, "%s",
		         error == NOT_REGULAR ? "Not a regular file" : strerror(error));
	}
	if (error || exec->upload)
		close_channel(exec->channels);
	free(exec->upload);
	exec->upload = NULL;
	exec->state = DRAINING;
}

static struct exec *add_transfer(uint32_t id, uint8_t channel, uint8_t kind) {
	struct exec *exec = add_exec(id);
	exec->transfer = exec->gone = true;
	exec->channels = must(calloc(1, sizeof *exec->channels));
	add_channel(exec, channel, kind);
	return exec;
}

/* Returns whether it is one. */
static bool copy_path(char path[PATH_ROOM], const uint8_t *text, size_t length) {
	if (length == 0 || memchr(text, 0, length))
		return false;
	size_t copied = smaller(length, PATH_ROOM - 1);
	memcpy(path, text, copied);
	path[copied] = 0;
	return true;
}

/* Not by opening it: that wakes writers of a FIFO and moves tapes. */
static int check_regular(const char *path, struct stat *status) {
	if (stat(path, status) < 0)
		return errno;
	return S_ISREG(status->st_mode) ? 0 : S_ISDIR(status->st_mode) ? EISDIR : NOT_REGULAR;
}

/* Returns an error as end_transfer takes it. */
static int open_to_read(const char *path, uint64_t offset, int *fd) {
	struct stat status;
	int error = check_regular(path, &status);
	if (error)
		return error;
	*fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	if (*fd < 0 || (offset && lseek(*fd, (off_t)(offset & INT64_MAX), SEEK_SET) < 0))
		return errno;
	return 0;
}

/* Its content leaves as what a process left in a FILE does, before EXIT. */
void start_read(uint32_t id, const uint8_t *payload, size_t length) {
	char path[PATH_ROOM];
	if (length < 16 || !copy_path(path, payload + 16, length - 16)) {
		protocol_error("READ is malformed");
		return;
	}
	uint64_t offset = get64(payload), most = get64(payload + 8);
	struct exec *exec = add_transfer(id, 1, FD_FILE);
	exec->channels->left = most ? most : UINT64_MAX;
	end_transfer(exec, open_to_read(path, offset, &exec->channels->fd));
}

/* A symbolic link stays: what it leads to is replaced, or made. Returns an errno. */
static int follow_links(char path[PATH_ROOM]) {
	for (int count = 0; count < MAX_LINKS; count++) {
		char link[PATH_MAX];
		ssize_t length = readlink(path, link, sizeof link - 1);
		if (length < 0)
			return errno == EINVAL || errno == ENOENT ? 0 : errno;
		const char *slash = link[0] == '/' ? NULL : strrchr(path, '/');
		size_t head = slash ? (size_t)(slash - path) + 1 : 0;
		if (head + (size_t)length >= PATH_MAX)
			return ENAMETOOLONG;
		memcpy(path + head, link, (size_t)length);
		path[head + (size_t)length] = 0;
	}
	return ELOOP;
}

/* What cannot be made shows when the file is. */
static void make_parents(char *path) {
	for (char *slash = path; (slash = strchr(slash + 1, '/'));) {
		*slash = 0;
		mkdir(path, 0777);
		*slash = '/';
	}
}

/* Returns the file's descriptor or -1 with errno. */
static int open_staging(struct upload *upload) {
	const char *slash = strrchr(upload->path, '/');
	int head = slash ? (int)(slash - upload->path) + 1 : 0;
	uint64_t chance = 0;
	if (getrandom(&chance, sizeof chance, GRND_NONBLOCK) < 0)
		chance = (uint64_t)now_ns();
	snprintf(upload->temporary, sizeof upload->temporary, "%.*s.hermitcrab-%016llx", head, upload->path,
	         (unsigned long long)chance);
	/* Only through /proc can it get a name later. */
	char directory[PATH_ROOM];
	snprintf(directory, sizeof directory, "%.*s", head, upload->path);
	int fd = have_proc ? open(head ? directory : ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600) : -1;
	if (fd >= 0)
		return fd;
	upload->staging = NAMED;
	fd = open(upload->temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd >= 0 || !upload->replaces)
		return fd;
	upload->staging = ELSEWHERE;
	return memfd_create("upload", MFD_CLOEXEC);
}

/* Returns an error as end_transfer takes it. */
static int open_to_write(struct upload *upload, bool parents, int *fd) {
	struct stat old;
	int error = follow_links(upload->path);
	if (error)
		return error;
	error = check_regular(upload->path, &old);
	if (error && error != ENOENT)
		return error;
	if (upload->path[strlen(upload->path) - 1] == '/')
		return EISDIR;
	if (!error) {
		upload->replaces = true;
		upload->owner = old.st_uid;
		upload->group = old.st_gid;
		upload->old_mode = old.st_mode & 07777;
		if (faccessat(AT_FDCWD, upload->path, W_OK, AT_EACCESS) < 0)
			return errno;
	} else if (parents) {
		make_parents(upload->path);
	}
	*fd = open_staging(upload);
	return *fd < 0 ? errno : 0;
}

void start_write(uint32_t id, const uint8_t *payload, size_t length) {
	struct upload *upload = must(calloc(1, sizeof *upload));
	if (length < 5 || get32(payload) > 07777 || payload[4] & ~WRITE_PARENTS ||
	    !copy_path(upload->path, payload + 5, length - 5)) {
		free(upload);
		protocol_error("WRITE is malformed");
		return;
	}
	upload->mode = get32(payload);
	struct exec *exec = add_transfer(id, 0, FD_INPUT);
	exec->upload = upload;
	int error = open_to_write(upload, payload[4] & WRITE_PARENTS, &exec->channels->fd);
	if (error)
		end_transfer(exec, error);
}

static uint32_t new_mode(const struct upload *upload) {
	if (upload->mode || upload->replaces)
		return upload->mode ? upload->mode : upload->old_mode;
	mode_t mask = umask(0);
	umask(mask);
	return 0666 & ~mask;
}

/* As the old file's, where there was one. Returns whether that could be done. */
static bool give_attributes(const struct upload *upload, int fd) {
	struct stat now;
	if (fstat(fd, &now) < 0)
		return false;
	bool owned = !upload->replaces || (now.st_uid == upload->owner && now.st_gid == upload->group);
	if (!owned && fchown(fd, upload->owner, upload->group) < 0)
		return false;
	return fchmod(fd, new_mode(upload)) == 0; /* last: a change of owner clears bits */
}

/* Returns whether the staged file has its name beside the real one. */
static bool is_beside(struct upload *upload, int fd) {
	char path[64];
	if (upload->staging == UNNAMED) {
		snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
		if (linkat(AT_FDCWD, path, AT_FDCWD, upload->temporary, AT_SYMLINK_FOLLOW) == 0)
			upload->staging = NAMED;
	}
	return upload->staging == NAMED;
}

static bool copy(int from, int to) {
	uint8_t bytes[COPY_CHUNK];
	ssize_t got;
	for (off_t at = 0; (got = pread(from, bytes, sizeof bytes, at)) > 0; at += got)
		for (ssize_t done = 0, n; done < got; done += n)
			if ((n = write(to, bytes + done, (size_t)(got - done))) < 0)
				return false;
	return got == 0;
}

/* For a mount point, a directory that we may not write to, an owner whom we cannot give files. */
static int write_in_place(struct upload *upload, int fd) {
	int to = open(upload->path, O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0666);
	if (to < 0)
		return errno;
	bool done = copy(fd, to);
	int error = done ? 0 : errno;
	if (done && upload->mode && fchmod(to, upload->mode) < 0)
		error = errno;
	close(to);
	return error;
}

static void drop_temporary(struct upload *upload) {
	if (upload->staging == NAMED)
		unlink(upload->temporary);
}

/* The client sent all of it. */
void commit_upload(struct exec *exec) {
	struct upload *upload = exec->upload;
	int fd = exec->channels->fd, error = 0;
	bool ready = upload->staging != ELSEWHERE && give_attributes(upload, fd) && is_beside(upload, fd);
	if (!ready || rename(upload->temporary, upload->path) < 0) {
		error = write_in_place(upload, fd);
		drop_temporary(upload);
	}
	end_transfer(exec, error);
}

/* The disk is full, say, or reading failed. */
void fail_transfer(struct exec *exec, int error) {
	if (exec->upload)
		drop_temporary(exec->upload);
	end_transfer(exec, error);
}

void cancel_transfer(struct exec *exec, uint32_t cause) {
	if (exec->state != RUNNING && exec->state != DRAINING)
		return;
	exec->ending.cause = (uint8_t)cause;
	exec->ending.code = -SIGKILL;
	if (exec->upload)
		drop_temporary(exec->upload);
	close_channel(exec->channels);
	end_transfer(exec, 0);
}
