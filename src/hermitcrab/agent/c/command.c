/* The command: from the supervisor's vfork to execve, and why it did not come that far. */
#include "agent.h"

#include <sys/ioctl.h>
#include <sys/mman.h>

/* In shared memory, so that it reaches the supervisor whether vfork shares memory (Linux) or copies it (qemu). */
static volatile struct {
	enum { PLACING_FDS, CHANGING_DIRECTORY, EXECUTING } stage;
	int error;
} *failure;

static bool is_target(const struct start *start, int fd) {
	for (size_t i = 0; i < start->fd_count; i++)
		if (start->fds[i].number == fd)
			return true;
	return false;
}

static int place_fds(const struct start *start) {
	int top = 2, moved[255];
	for (size_t i = 0; i < start->fd_count; i++)
		if (start->fds[i].number > top)
			top = start->fds[i].number;
	/* First what is in the way above the highest target, so that no dup2 overwrites a source still needed. */
	for (size_t i = 0; i < start->fd_count; i++) {
		moved[i] = start->fds[i].fd;
		if (is_target(start, moved[i]) && (moved[i] = fcntl(moved[i], F_DUPFD_CLOEXEC, top + 1)) < 0)
			return -1;
	}
	for (size_t i = 0; i < start->fd_count; i++)
		if (dup2(moved[i], start->fds[i].number) < 0)
			return -1;
	/* As the leader of a new session, which we are by now, we get it as our controlling one. */
	return start->terminal ? ioctl(start->terminal->number, TIOCSCTTY, 0) : 0;
}

/* Returns the errno; ELIBACC when the file is there and its interpreter is not. */
static int try_program(const char *path, const struct start *start) {
	execve(path, start->argv, start->env);
	return errno == ENOENT && access(path, F_OK) == 0 ? ELIBACC : errno;
}

/* As execvpe, with our PATH and without its detour to /bin/sh. Returns the errno. */
static int execute(const struct start *start) {
	if (!*start->program || strchr(start->program, '/'))
		return try_program(start->program, start);
	int result = ENOENT;
	for (const char *at = start->search;; at++) {
		char path[8192];
		int length = (int)strcspn(at, ":");
		int n = snprintf(path, sizeof path, "%.*s%s%s", length, at, length ? "/" : "./", start->program);
		int error = n < (int)sizeof path ? try_program(path, start) : ENOENT;
		if (error == EACCES)
			result = EACCES; /* unless a later directory has one that can be run */
		else if (error != ENOENT && error != ENOTDIR)
			return error;
		at += length;
		if (!*at)
			return result;
	}
}

static _Noreturn void become_command(const struct start *start) {
	sigset_t none;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	setsid();
	failure->stage = PLACING_FDS;
	if (place_fds(start) == 0) {
		setrlimit(RLIMIT_NOFILE, &original_nofile);
		failure->stage = CHANGING_DIRECTORY;
		if (!*start->cwd || chdir(start->cwd) == 0) {
			failure->stage = EXECUTING;
			errno = execute(start);
		}
	}
	failure->error = errno;
	_exit(127);
}

/* Returns its pid, or -1 with errno. vfork: nothing is copied, and no order is taken before the program runs. */
pid_t start_command(const struct start *start) {
	if (!failure) {
		void *shared = mmap(NULL, sizeof *failure, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
		if (shared == MAP_FAILED)
			return -1;
		failure = shared;
	}
	failure->error = 0;
	pid_t pid = vfork();
	if (pid == 0)
		become_command(start);
	return pid;
}

void not_started(struct ending *ending, int code, const char *what, const char *name, int error) {
	ending->cause = CAUSE_NOT_STARTED;
	ending->code = code;
	snprintf(ending->reason, sizeof ending->reason, "%s%.400s: %s", what, name, strerror(error));
}

/* For a command that exited: was that still our program? */
void explain_failure(const struct start *start, struct ending *ending) {
	int error = failure->error;
	if (!error)
		return;
	if (failure->stage == PLACING_FDS)
		not_started(ending, 126, "cannot set up descriptors", "", error);
	else if (failure->stage == CHANGING_DIRECTORY)
		not_started(ending, 126, "cannot change to directory ", start->cwd, error);
	else if (error == ELIBACC)
		not_started(ending, 126, "the interpreter is missing of ", start->program, ENOENT);
	else
		not_started(ending, error == ENOENT ? 127 : 126, "cannot execute ", start->program, error);
}
