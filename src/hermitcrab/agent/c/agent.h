/* What the agent's files share. main.c says which processes there are, ../PROTOCOL.md is the wire format. */
#ifndef HERMITCRAB_AGENT_H
#define HERMITCRAB_AGENT_H

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/types.h>
#include <unistd.h>

enum { VERSION = 1, MAX_PAYLOAD = 1 << 20, OUTPUT_CREDIT = 1 << 20, INPUT_CREDIT = 1 << 20 };
enum { ASK_START = 1, ASK_DATA, ASK_CLOSE, ASK_CREDIT, ASK_SIGNAL, ASK_KILL, ASK_TIMER,
       ASK_RESIZE, ASK_READ, ASK_WRITE, ASK_PING, ASK_ATTACH, ASK_FORGET };
enum { TELL_HELLO = 64, TELL_DATA, TELL_CLOSE, TELL_CREDIT, TELL_EXIT, TELL_GONE, TELL_ERROR,
       TELL_KNOWN, TELL_SYNCED };
enum { FIELD_ARG = 1, FIELD_ENV, FIELD_CWD, FIELD_FD, FIELD_PROGRAM, FIELD_INHERIT };
enum { FD_NULL, FD_INPUT, FD_OUTPUT, FD_CONTENT, FD_SAME, FD_FILE, FD_TERMINAL };
enum { CAUSE_ENDED, CAUSE_KILL, CAUSE_TIMER, CAUSE_NOT_STARTED, CAUSE_SUPERVISOR_LOST };
enum { FLAG_SURVIVORS = 1, FLAG_OUT_OF_MEMORY = 2 };
enum { FEATURE_SUBREAPER = 1, FEATURE_SEES_ALL = 2, FEATURE_TERMINALS = 4, FEATURE_FILES = 8, FEATURE_DETACHED = 16,
       FEATURE_TOOLS = 32 };
enum { WRITE_PARENTS = 1 };

/* `header` and `ending` are laid out as on the wire. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire format is little-endian");

struct header {
	uint32_t length;
	uint8_t type, channel;
	uint16_t reserved;
	uint32_t id;
};

static const uint8_t preamble[8] = {0, 'H', 'C', 'R', 'A', 'B', VERSION & 255, VERSION >> 8};

struct ending {
	uint8_t cause, flags;
	uint16_t reserved;
	int32_t code;
	uint64_t user_us, system_us, peak_kib, wall_us;
	char reason[600]; /* sent without its NUL */
};
_Static_assert(sizeof(struct header) == 12 && offsetof(struct ending, reason) == 40, "no padding");

enum {
	GATHER = 256 << 10,  /* stop collecting frames for one write() at that size */
	LARGEST_FILE = 64 << 20, /* of what a process left in a FILE, so much is sent */
	BACKLOG = 4 << 20,   /* a client that does not read this much is not listened to either */
	BIG_PIPE = 1 << 20,  /* the most an unprivileged process may ask for */
	MAX_FDS = 16 << 10,  /* the most we open; enough for thousands of execs */
	STOPS_FORGIVEN = 10,
	TERMINAL_HOLDS = 64 << 10, /* more than the kernel keeps of what a terminal shows */
	LOST_GRACE_MS = 250, /* between TERM and KILL when the client or the agent is gone */
};

#define MS INT64_C(1000000)
#define SECOND (1000 * MS)
#define NEVER INT64_MAX
#define GIVE_UP (2 * SECOND) /* a kill without progress for that long has survivors */
#define RESCAN (20 * MS)     /* SIGCHLD drives a kill on; this is for what it cannot tell */

/* One descriptor of a process to be. */
struct planned_fd {
	uint8_t number, kind;
	const uint8_t *content; /* of FD_CONTENT, or the size of FD_TERMINAL */
	size_t size;
	const struct planned_fd *same; /* of FD_SAME */
	int fd;
};

/* A START frame, understood. The strings are in the frame. */
struct start {
	char **argv, **env;
	size_t argc, envc;
	bool inherit;
	const char *cwd, *program, *search;
	const struct planned_fd *terminal; /* the one of kind FD_TERMINAL, or NULL */
	size_t copied; /* how long the copy for a spare supervisor is; 0 when there is none */
	size_t fd_count;
	struct planned_fd fds[255];
};

/* Output that may have to be sent again, in an agent that serves. */
struct kept {
	uint8_t *bytes;
	size_t at, length, room;
};

/* The agent's end of one pipe, or a FILE. A terminal has two of the same number: what is typed and what is shown. */
struct channel {
	uint8_t number, kind;
	bool terminal;
	int fd;                /* -1 when closed */
	uint32_t credit;       /* what we may still send; of an INPUT, what the client may */
	bool loud;             /* OUTPUT: worth splicing */
	uint64_t left;         /* how much to send before EXIT; OUTPUT: no bound, FILE: 0 while the process runs */
	bool ending;           /* INPUT: the client sent CLOSE */
	bool in_line;          /* INPUT of a terminal: what was typed last did not end a line */
	uint8_t *waiting;      /* INPUT: what the pipe did not take yet */
	size_t waiting_length;
	uint64_t passed;       /* how many bytes came through so far */
	struct kept kept;
};

enum exec_state {
	RUNNING,
	DRAINING, /* the main process ended; what its pipes held then goes out first */
	EXITED,   /* EXIT was sent */
	BURIED,   /* GONE was sent; kept until the supervisor is reaped, and it is forgotten */
};

struct exec {
	struct exec *next;
	uint32_t id;
	enum exec_state state;
	pid_t supervisor; /* 0 when reaped */
	int socket;       /* to the supervisor, -1 when it said all or was killed */
	bool gone;        /* no process is left */
	bool forgotten;   /* nobody will ask for it after GONE: always so unless we serve */
	bool transfer;    /* a READ or a WRITE, which has no process */
	struct upload *upload; /* of a WRITE under way */
	struct ending ending;
	int64_t timer_at;
	uint32_t timer_grace_ms;
	unsigned stops;     /* how often the command stopped its supervisor */
	int64_t check_at;   /* when to see whether a killing supervisor was itself stopped */
	int64_t give_up_at; /* on finding all that a killed supervisor left */
	int64_t listen_at;  /* from when on its pipes are read: see listening() */
	size_t channel_count;
	struct channel *channels;
};

static inline struct channel *end_of_channels(const struct exec *exec) {
	return exec->channels + exec->channel_count;
}

/* From the agent to a supervisor. */
enum { ORDER_SIGNAL, ORDER_KILL, ORDER_START };
struct order { /* START is followed by the frame's payload and comes with descriptors, see spare.c */
	uint32_t what;
	uint32_t value; /* the signal, or the cause of the kill */
	uint32_t grace_ms;
};

/* From a supervisor to the agent. Both events may come in one message. */
struct report {
	bool exited, gone;
	bool spare; /* it may serve again, and says so by one more byte when it is ready */
	struct ending ending;
};

/* main.c */
extern pid_t agent_pid;
extern bool have_subreapers; /* else what a command detached is nobody's, as in older gVisors */
extern bool have_proc; /* /proc is there and shows the processes as we number them */
extern int dev_null;
extern struct rlimit original_nofile;
extern volatile sig_atomic_t closing;

void watch(int fd, short events, struct exec *exec, struct channel *channel);
void say_hello(void);

static inline int64_t earlier(int64_t a, int64_t b) { return a < b ? a : b; }
static inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
static inline uint32_t get32(const uint8_t *p) {
	return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* options.c */
struct options {
	const char *serve, *connect, *join; /* a path, or NULL */
	long lease; /* in seconds, 0 for none */
	bool unlink, text;
};
bool read_options(char **argv, struct options *options);
void unlink_self(const char *name);

static inline uint64_t get64(const uint8_t *p) { return get32(p) | (uint64_t)get32(p + 4) << 32; }

/* util.c */
int64_t now_ns(void);
void *must(void *allocated);
void close_fd(int *fd);
void close_from(int first);
size_t line_of(uint8_t *to, const uint8_t *bytes, size_t length);
int wait_until(int64_t time, struct pollfd *fds, size_t count);

/* wire.c */
extern bool sealed; /* nothing is sent any more: after ERROR, or when nobody reads */
extern bool as_text; /* what is sent must be UTF-8 */
extern int exit_status;
void greet(const void *hello, size_t length);
void tell(uint8_t type, uint32_t id, uint8_t channel, const void *payload, size_t length);
ssize_t tell_output(uint32_t id, struct channel *channel, size_t limit);
void protocol_error(const char *why);
size_t queued(void);
bool flush(void);
void set_lease(long seconds);
int64_t lease_end(void);
void end_lease(void);
void read_client(void);
bool lost_client(void);
void reset_wire(void);

/* request.c */
bool is_request(const struct header *header);
void on_request(const struct header *header, uint8_t *payload);

/* channel.c */
struct channel *add_channel(struct exec *exec, uint8_t number, uint8_t kind);
struct channel *find_channel(const struct exec *exec, uint8_t number, uint8_t kind);
void close_channel(struct channel *channel);
bool may_take(const struct channel *channel);
void take_output(struct exec *exec, struct channel *channel);
void drop_output(struct channel *channel);
void take_input(struct exec *exec, struct channel *channel, const uint8_t *data, size_t length);
void feed(struct exec *exec, struct channel *channel);
void finish_input(struct exec *exec, struct channel *channel);
void nobody_reads(struct exec *exec, struct channel *channel);

/* exec.c */
extern struct exec *execs;
struct exec *add_exec(uint32_t id);
struct exec *find_exec(uint32_t id);
void begin_end(struct exec *exec, const struct ending *ending);
void settle_execs(void);
void read_report(struct exec *exec);
void give_order(struct exec *exec, uint32_t what, uint32_t value, uint32_t grace_ms);
void check_supervisor(struct exec *exec, int64_t now);
bool is_orphaned(const struct exec *exec);
void reap_supervisors(void);
bool hunt_strays(void);

/* terminal.c */
int open_terminal(const uint8_t *size, int *master);
void resize_terminal(int fd, const uint8_t *size);
size_t end_of_typing(const struct channel *channel, uint8_t text[2]);

/* file.c */
void start_read(uint32_t id, const uint8_t *payload, size_t length);
void start_write(uint32_t id, const uint8_t *payload, size_t length);
void commit_upload(struct exec *exec);
void fail_transfer(struct exec *exec, int error);
void cancel_transfer(struct exec *exec, uint32_t cause);

/* memory.c */
void begin_counting_kills(void);
bool memory_ran_out(void);

/* detached.c */
extern bool serving;  /* as --serve does: what follows matters only then */
extern bool attached; /* there is a client */
bool serve_apart(const char *path);
bool begin_serving(const char *path);
void end_serving(void);
void watch_newcomers(void);
void on_newcomer(int fd);
void detach(void);
void keep_output(struct channel *channel, const uint8_t *bytes, size_t length);
void release_output(struct channel *channel, size_t length);
void forget(struct exec *exec);
void forget_oldest(void);
int connect_to(const char *path);

/* relay.c */
int relay(const char *path, bool text);

/* start.c */
const char *read_start(struct start *start, uint8_t *payload, size_t length);
void free_start(struct start *start);
void start_exec(uint32_t id, uint8_t *payload, size_t length);

/* spare.c */
bool is_spare(pid_t pid);
void lose_spare(pid_t pid, bool reaped);
void keep_spare(struct exec *exec);
int64_t expire_spares(int64_t now);
size_t copy_job(const uint8_t *payload, size_t length);
bool give_to_spare(struct exec *exec, const struct start *start);
bool take_job(int socket, struct start *start);

/* standing.c */
void remember_standing(void);
bool has_usual_standing(void);

/* tools.c */
int run_tool(int count, char **arguments);

/* supervisor.c */
_Noreturn void supervise(const struct start *start, int socket);

/* command.c */
pid_t start_command(const struct start *start);
void explain_failure(const struct start *start, struct ending *ending);
void not_started(struct ending *ending, int code, const char *what, const char *name, int error);

/* tree.c */
bool is_stopped(pid_t pid);
void signal_descendants(pid_t root, int number);
size_t kill_descendants(pid_t root, bool (*spared)(pid_t));

#endif
