/* The file tools (`agent --files VERB ...`): programs of their own, in the agent's binary. ../../files/tools.py
 * says what each takes and prints. */
#ifndef HERMITCRAB_TOOLS_H
#define HERMITCRAB_TOOLS_H

#include "agent.h"

#include <sys/stat.h>

enum { FAILED = 1, MISUSED = 2, NOT_THERE = 3 }; /* exit statuses */
enum { IO_CHUNK = 256 << 10, BLOCK = 512 };

#define ONLY_DIRECTORY (O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC)

/* tools.c */
_Noreturn void fail(const char *path, const char *why);
_Noreturn void fail_with(const char *path, int error);
void put(const void *bytes, size_t length);
void flush_output(void);
size_t read_input(void *bytes, size_t length);
const char *next_name(void);
int open_directory(const char *path);
bool make_directories(char *path, mode_t mode);
int open_parent(int root, const char *path, bool make);
bool is_within(const char *path);
const char *last_part(const char *path);
static inline bool is_missing(int error) { return error == ENOENT || error == ENOTDIR || error == ELOOP; }

/* tools_walk.c */
/* Called for each entry before what is in it; returns whether to go into a directory. */
typedef bool visitor(int directory, const char *name, const char *path, const struct stat *status);
void walk_tree(int root, bool deep, visitor *visit);
int tool_stat(char **arguments);
int tool_list(char **arguments);
int tool_walk(char **arguments);

/* tools_remove.c */
int tool_remove(char **arguments);
int tool_remove_many(char **arguments);

/* tools_pack.c, tools_unpack.c */
int tool_pack(char **arguments);
int tool_unpack(char **arguments);

#endif
