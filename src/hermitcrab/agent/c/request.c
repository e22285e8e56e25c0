/* What the client asks for, frame by frame. */
#include "agent.h"

/* Is it of a type that clients send, and as long as that type is? */
bool is_request(const struct header *header) {
	enum { NONE = -1, ANY = -2 };
	static const int lengths[] = {
		NONE, [ASK_START] = ANY, [ASK_DATA] = ANY, [ASK_CLOSE] = 0, [ASK_CREDIT] = 4,
		[ASK_SIGNAL] = 1, [ASK_KILL] = 4, [ASK_TIMER] = 8, [ASK_RESIZE] = 4, [ASK_READ] = ANY, [ASK_WRITE] = ANY,
		[ASK_PING] = 0, [ASK_ATTACH] = NONE, [ASK_FORGET] = 0,
	};
	int length = header->type <= ASK_FORGET ? lengths[header->type] : NONE;
	return length == ANY || length == (int)header->length;
}

static void on_data(struct exec *exec, struct channel *channel, const uint8_t *data, uint32_t length) {
	if (channel->ending || length > channel->credit) {
		protocol_error(channel->ending ? "DATA after CLOSE" : "DATA beyond the credit");
		return;
	}
	channel->credit -= length;
	channel->passed += length;
	if (channel->fd >= 0)
		take_input(exec, channel, data, length);
}

static void on_credit(struct channel *channel, uint32_t amount) {
	if (amount > OUTPUT_CREDIT - channel->credit) {
		protocol_error("CREDIT for more than was sent");
		return;
	}
	channel->credit += amount;
	if (serving)
		release_output(channel, amount);
}

static void on_channel_request(struct exec *exec, const struct header *header, const uint8_t *payload) {
	bool credit = header->type == ASK_CREDIT;
	struct channel *channel = find_channel(exec, header->channel, credit ? FD_OUTPUT : FD_INPUT);
	if (!channel && credit)
		channel = find_channel(exec, header->channel, FD_FILE);
	if (!channel)
		protocol_error("a frame for a channel that the exec does not have");
	else if (credit)
		on_credit(channel, get32(payload));
	else if (exec->state != RUNNING)
		return; /* it was on its way when the process ended */
	else if (header->type == ASK_DATA)
		on_data(exec, channel, payload, header->length);
	else
		finish_input(exec, channel);
}

static void on_resize(struct exec *exec, const struct header *header, const uint8_t *payload) {
	struct channel *channel = find_channel(exec, header->channel, FD_OUTPUT);
	if (!channel || !channel->terminal)
		protocol_error("RESIZE of what is no terminal");
	else if (channel->fd >= 0)
		resize_terminal(channel->fd, payload);
}

static void on_signal(struct exec *exec, uint8_t number) {
	if (number < 1 || number >= NSIG)
		protocol_error("SIGNAL with a number that is no signal");
	else
		give_order(exec, ORDER_SIGNAL, number, 0);
}

static void on_timer(struct exec *exec, uint32_t after_ms, uint32_t grace_ms) {
	if (exec->state != RUNNING || exec->transfer)
		return;
	exec->timer_at = after_ms ? now_ns() + after_ms * MS : NEVER;
	exec->timer_grace_ms = grace_ms;
}

/* Its result is known to the client only when there is one. */
static void on_forget(struct exec *exec) {
	if (serving && exec->state != RUNNING)
		forget(exec);
}

/* Those that make an exec. */
static void on_new(const struct header *header, uint8_t *payload) {
	if (header->type == ASK_START)
		start_exec(header->id, payload, header->length);
	else if (header->type == ASK_READ)
		start_read(header->id, payload, header->length);
	else
		start_write(header->id, payload, header->length);
}

void on_request(const struct header *header, uint8_t *payload) {
	struct exec *exec = find_exec(header->id);
	bool new = header->type == ASK_START || header->type == ASK_READ || header->type == ASK_WRITE;
	if (new && (exec || !header->id))
		protocol_error(exec ? "an id that is in use" : "an exec without an id");
	else if (new)
		on_new(header, payload);
	else if (header->type == ASK_PING || !exec)
		return; /* it ended while the frame was on its way */
	else if (header->type == ASK_SIGNAL)
		on_signal(exec, payload[0]);
	else if (header->type == ASK_KILL)
		give_order(exec, ORDER_KILL, CAUSE_KILL, get32(payload));
	else if (header->type == ASK_TIMER)
		on_timer(exec, get32(payload), get32(payload + 4));
	else if (header->type == ASK_FORGET)
		on_forget(exec);
	else if (header->type == ASK_RESIZE)
		on_resize(exec, header, payload);
	else
		on_channel_request(exec, header, payload);
}
