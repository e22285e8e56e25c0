/* A pseudo-terminal: the agent's side of a descriptor of kind TERMINAL. */
#include "agent.h"

#include <sys/ioctl.h>
#include <termios.h>

#ifndef TIOCGPTPEER
#define TIOCGPTPEER _IO('T', 0x41)
#endif

/* A container may have its own /dev/pts without a /dev/ptmx. */
static int open_master(void) {
	int flags = O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK;
	int fd = open("/dev/ptmx", flags);
	return fd >= 0 ? fd : open("/dev/pts/ptmx", flags);
}

/* By its master, which works without its path; Linux before 4.13 knows only the path. */
static int open_slave(int master) {
	int unlocked = 0, flags = O_RDWR | O_NOCTTY | O_CLOEXEC;
	if (ioctl(master, TIOCSPTLCK, &unlocked) < 0)
		return -1;
	int fd = ioctl(master, TIOCGPTPEER, flags);
	unsigned number;
	char path[32];
	if (fd >= 0 || ioctl(master, TIOCGPTN, &number) < 0)
		return fd;
	snprintf(path, sizeof path, "/dev/pts/%u", number);
	return open(path, flags);
}

static void know_utf8(int fd) {
	struct termios settings;
	if (tcgetattr(fd, &settings) < 0)
		return;
	settings.c_iflag |= IUTF8;
	tcsetattr(fd, TCSANOW, &settings);
}

void resize_terminal(int fd, const uint8_t *size) {
	struct winsize window = {
		.ws_row = (unsigned short)(size[0] | size[1] << 8), .ws_col = (unsigned short)(size[2] | size[3] << 8)};
	ioctl(fd, TIOCSWINSZ, &window);
}

/* Returns the process's end and sets ours, or -1 with errno. */
int open_terminal(const uint8_t *size, int *master) {
	*master = open_master();
	if (*master < 0)
		return -1;
	int slave = open_slave(*master);
	if (slave < 0) {
		int error = errno;
		close_fd(master);
		errno = error;
		return -1;
	}
	know_utf8(slave);
	resize_terminal(*master, size);
	return slave;
}

/*
 * Half a terminal cannot be hung up, so the client's CLOSE types the character for "end of file". It
 * only ends a line that was begun, and must then come twice. Returns how many bytes at `text` to type.
 */
size_t end_of_typing(const struct channel *channel, uint8_t text[2]) {
	struct termios settings;
	if (channel->fd < 0 || tcgetattr(channel->fd, &settings) < 0 || !settings.c_cc[VEOF])
		return 0;
	text[0] = text[1] = settings.c_cc[VEOF];
	return channel->in_line ? 2 : 1;
}
