/* The pipes of a process: its output towards the client, the client's input towards it. */
#include "agent.h"

enum {
	LOUD = 32 << 10,        /* a pipe that gave that much at once is spliced from then on */
	CREDIT_STEP = 64 << 10, /* return input credit in pieces of at least this */
};

struct channel *find_channel(const struct exec *exec, uint8_t number, uint8_t kind) {
	for (struct channel *channel = exec->channels; channel < end_of_channels(exec); channel++)
		if (channel->number == number && channel->kind == kind)
			return channel;
	return NULL;
}

void close_channel(struct channel *channel) {
	close_fd(&channel->fd);
	free(channel->waiting);
	channel->waiting = NULL;
	channel->waiting_length = 0;
	channel->left = 0;
}

bool may_take(const struct channel *channel) { return channel->fd >= 0 && channel->left && channel->credit; }

void take_output(struct exec *exec, struct channel *channel) {
	ssize_t n = tell_output(exec->id, channel, smaller(channel->credit, channel->left));
	if (n > 0) {
		channel->credit -= (uint32_t)n;
		channel->left -= (uint64_t)n;
		if (n >= LOUD && !channel->loud && channel->kind == FD_OUTPUT) {
			channel->loud = true;
			fcntl(channel->fd, F_SETPIPE_SZ, BIG_PIPE);
		}
	} else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
		/* EXIT closes all channels, so a CLOSE just before it would say nothing. */
		if (exec->state == RUNNING)
			tell(TELL_CLOSE, exec->id, channel->number, NULL, 0);
		close_channel(channel);
	} else if (errno == EAGAIN && exec->state == DRAINING) {
		channel->left = 0; /* some process read from its own output: those bytes are gone */
	}
}

/* After EXIT: what background children print is read so that they neither block nor die, and dropped. */
void drop_output(struct channel *channel) {
	static char nowhere[64 << 10];
	ssize_t n = read(channel->fd, nowhere, sizeof nowhere);
	if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
		close_channel(channel);
}

void nobody_reads(struct exec *exec, struct channel *channel) {
	if (!channel->ending)
		tell(TELL_CLOSE, exec->id, channel->number, NULL, 0);
	close_channel(channel);
}

/* What was passed on is what is neither waiting here nor open to the client. */
static void return_credit(struct exec *exec, struct channel *channel) {
	uint32_t passed_on = INPUT_CREDIT - channel->credit - (uint32_t)channel->waiting_length;
	if (passed_on < CREDIT_STEP)
		return;
	channel->credit += passed_on;
	tell(TELL_CREDIT, exec->id, channel->number, &passed_on, sizeof passed_on);
}

/* Gives the pipe as much as it takes of what waits. */
void feed(struct exec *exec, struct channel *channel) {
	size_t done = 0;
	while (done < channel->waiting_length) {
		ssize_t n = write(channel->fd, channel->waiting + done, channel->waiting_length - done);
		if (n >= 0) {
			done += (size_t)n;
		} else if (errno == EAGAIN) {
			break;
		} else if (errno != EINTR) {
			nobody_reads(exec, channel);
			return;
		}
	}
	channel->waiting_length -= done;
	memmove(channel->waiting, channel->waiting + done, channel->waiting_length);
	return_credit(exec, channel);
	if (channel->ending && !channel->waiting_length)
		close_channel(channel);
}

void take_input(struct exec *exec, struct channel *channel, const uint8_t *data, size_t length) {
	if (!length)
		return;
	bool queue = channel->waiting_length;
	channel->waiting = must(realloc(channel->waiting, channel->waiting_length + length));
	memcpy(channel->waiting + channel->waiting_length, data, length);
	channel->waiting_length += length;
	if (!queue) /* otherwise the pipe is known to be full */
		feed(exec, channel);
}
