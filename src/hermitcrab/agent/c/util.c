/* Small things that several files need. */
#include "agent.h"

#include <dirent.h>
#include <sys/syscall.h>
#include <time.h>

#ifndef SYS_close_range
#define SYS_close_range 436 /* the same on every architecture */
#endif

int64_t now_ns(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * SECOND + t.tv_nsec;
}

/* Without memory there is nothing sensible left to do; the supervisors see us go and end their trees. */
void *must(void *allocated) {
	if (!allocated)
		_exit(1);
	return allocated;
}

void close_fd(int *fd) {
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

/* Linux before 5.9 and some seccomp filters know no close_range. */
static bool close_listed(int first) {
	DIR *listed = opendir("/proc/self/fd");
	if (!listed)
		return false;
	for (struct dirent *entry; (entry = readdir(listed));) {
		int fd = atoi(entry->d_name);
		if (fd >= first && fd != dirfd(listed))
			close(fd);
	}
	closedir(listed);
	return true;
}

/* Old kernels and gVisor have no close_range, and there trying thousands can take a second. */
void close_from(int first) {
	if (syscall(SYS_close_range, first, ~0U, 0) == 0 || close_listed(first))
		return;
	for (int fd = first; fd < MAX_FDS; fd++)
		close(fd);
}

/*
 * For what carries nothing but text, and may cut it anywhere: a mark, base64, and the end of the line. Returns how
 * long that is, at most 6 + length * 4 / 3.
 */
size_t line_of(uint8_t *to, const uint8_t *bytes, size_t length) {
	static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
	uint8_t *at = to;
	*at++ = '~';
	for (size_t i = 0; i < length; i += 3) {
		uint8_t group[3] = {0};
		memcpy(group, bytes + i, smaller(3, length - i));
		uint32_t bits = (uint32_t)(group[0] << 16 | group[1] << 8 | group[2]);
		for (int shift = 18; shift >= 0; shift -= 6)
			*at++ = (uint8_t)digits[bits >> shift & 63];
	}
	for (size_t i = length % 3; i % 3; i++)
		at[(int)i - 3] = '=';
	*at++ = '\n';
	return (size_t)(at - to);
}

/* Signals are let in only here, so that none comes between looking and waiting. */
int wait_until(int64_t time, struct pollfd *fds, size_t count) {
	sigset_t none;
	sigemptyset(&none);
	int64_t ns = time == NEVER ? 0 : time - now_ns();
	struct timespec left = {0, 0};
	if (ns > 0)
		left = (struct timespec){ns / SECOND, ns % SECOND};
	return ppoll(fds, count, time == NEVER ? NULL : &left, &none);
}
