/* The pipes of a process: its output towards the client, the client's input towards it. */
#include "agent.h"

enum {
	LOUD = 32 << 10,        /* a pipe that gave that much at once is spliced from then on */
	CREDIT_STEP = 64 << 10, /* return input credit in pieces of at least this */
};

/* There must be room for it. */
struct channel *add_channel(struct exec *exec, uint8_t number, uint8_t kind) {
	struct channel *channel = &exec->channels[exec->channel_count++];
	*channel = (struct channel){.number = number, .kind = kind, .fd = -1};
	channel->credit = kind == FD_INPUT ? INPUT_CREDIT : OUTPUT_CREDIT;
	return channel;
}

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
		channel->credit -= attached ? (uint32_t)n : 0;
		channel->left -= (uint64_t)n;
		channel->passed += (uint64_t)n;
		if (n >= LOUD && !channel->loud && channel->kind == FD_OUTPUT && !serving) {
			channel->loud = true;
			fcntl(channel->fd, F_SETPIPE_SZ, BIG_PIPE);
		}
	} else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
		/* EXIT closes all channels, so a CLOSE just before it would say nothing. */
		if (exec->state == RUNNING)
			tell(TELL_CLOSE, exec->id, channel->number, NULL, 0);
		if (n < 0 && exec->transfer)
			fail_transfer(exec, errno);
		else if (exec->state == RUNNING && channel->terminal)
			channel->left = 0; /* closing it might send a SIGHUP to a process that just left its terminal */
		else
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
	if (!channel->ending && !channel->terminal) /* of a terminal, what it shows tells that */
		tell(TELL_CLOSE, exec->id, channel->number, NULL, 0);
	close_channel(channel);
}

/* What was passed on is what is neither waiting here nor open to the client. */
static void return_credit(struct exec *exec, struct channel *channel) {
	if (channel->ending)
		return;
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
			if (exec->transfer)
				fail_transfer(exec, errno);
			else
				nobody_reads(exec, channel);
			return;
		}
	}
	channel->waiting_length -= done;
	if (done)
		memmove(channel->waiting, channel->waiting + done, channel->waiting_length);
	return_credit(exec, channel);
	if (!channel->ending || channel->waiting_length)
		return;
	if (exec->transfer)
		commit_upload(exec);
	else
		close_channel(channel);
}

static void append(struct channel *channel, const uint8_t *data, size_t length) {
	channel->waiting = must(realloc(channel->waiting, channel->waiting_length + length));
	memcpy(channel->waiting + channel->waiting_length, data, length);
	channel->waiting_length += length;
}

void take_input(struct exec *exec, struct channel *channel, const uint8_t *data, size_t length) {
	if (!length)
		return;
	bool queue = channel->waiting_length;
	append(channel, data, length);
	if (channel->terminal)
		channel->in_line = !memchr("\n\r\3\4", data[length - 1], 4);
	if (!queue) /* otherwise the pipe is known to be full */
		feed(exec, channel);
}

/* The client sent CLOSE. */
void finish_input(struct exec *exec, struct channel *channel) {
	uint8_t text[2];
	size_t length = channel->terminal && !channel->ending ? end_of_typing(channel, text) : 0;
	channel->ending = true;
	if (length)
		append(channel, text, length);
	if (channel->fd >= 0)
		feed(exec, channel);
}
