"""What one command leaves to the next: variables, functions, aliases."""

from __future__ import annotations

from hermitcrab.testing.inside import attributes, say, value, works
from hermitcrab.testing.suite import Opener, case, each


@case
def a_directory_is_remembered(open: Opener) -> None:
    """`cd` in one command is where the next one starts."""
    env = open()
    say(env, "cd /usr")
    assert env.cwd == "/usr"
    assert say(env, "pwd") == "/usr"


@case
def the_previous_directory_is_remembered(open: Opener) -> None:
    """`cd -` goes back to where an earlier command was."""
    env = open()
    say(env, "cd /usr")
    say(env, "cd /")
    assert say(env, "echo $OLDPWD; cd - >/dev/null; pwd") == "/usr\n/usr"
    assert say(env, "cd - >/dev/null; pwd") == "/"


@case
def an_exported_variable_reaches_later_programs(open: Opener) -> None:
    """`export` in one command is in the environment of programs that the next one starts."""
    env = open()
    say(env, "export greeting='hello world'")
    assert say(env, "env | grep ^greeting=") == "greeting=hello world"
    assert env.state.environ["greeting"] == "hello world"


@case
def a_shell_variable_is_remembered_but_not_exported(open: Opener) -> None:
    """A plain assignment is there in the next command, and stays out of the environment."""
    env = open()
    say(env, "plain=1")
    assert say(env, "echo $plain; env | grep ^plain= || echo private") == "1\nprivate"


@case
def an_unset_variable_stays_unset(open: Opener) -> None:
    """`unset` is remembered as well as a value is."""
    env = open()
    say(env, "export gone=1 kept=2")
    say(env, "unset gone; export -n kept")
    assert say(env, "echo ${gone-unset} $kept; env | grep -c ^kept=; true") == "unset 2\n0"


@each(
    {
        "empty": "",
        "blanks": "  a  b\t",
        "quotes": 'it\'s "quoted" `not run` $(not run) $HOME \\ \\n',
        "lines": "first\nsecond\n\n",
        "controls": "\x01\x02\x7f\x1b[0m\r\b\x0c",
        "unicode": "crab \U0001f980 é 中文",
        "not_utf8": "\udcff\udc80 x",
        "expressions": "*?[a-z]{1,2}~!#&|;<>()",
        "assignment": "declare -x evil=1\ndeclare -- other=2",
        "long": "x" * 200_000,
    }
)
def a_value_is_remembered_to_the_byte(open: Opener, text: str) -> None:
    """Whatever bytes a variable holds, the next command finds exactly them."""
    env = open()
    env.execute("exact=$(cat; echo .); exact=${exact%.}", stdin_data=text)
    assert value(env, "exact") == text
    works(env)
    result = env.execute("printf %s \"$exact\" | od -An -v -tx1 | tr -d ' \\n'")
    assert result.output == text.encode(errors="surrogateescape").hex()
    assert "evil" not in env.state.variables


@case
def an_array_is_remembered(open: Opener) -> None:
    """An indexed array comes back element by element, its gaps included."""
    env = open()
    say(env, "list=(one 'two words' '' $'l\\nf'); list[9]=far; export list; empty=()")
    assert say(env, 'echo "${#list[@]} ${!list[*]} [${list[1]}] [${list[2]}] ${list[3]@Q} ${list[9]}"') == (
        "5 0 1 2 3 9 [two words] [] $'l\\nf' far"
    )
    assert attributes(env, "empty") == {"a"}
    assert say(env, "empty+=(x); echo ${#empty[@]}") == "1"


@case
def an_associative_array_is_remembered(open: Opener) -> None:
    """An associative array comes back with whatever keys it has."""
    env = open()
    say(
        env,
        "declare -A map=([plain]=1 ['two words']=2 [\"a'b\"]=3 ['x]y']=4 ['$HOME']=5 [$'n\\nl']=6 ['@']=7)",
    )
    asked = (
        """echo "${#map[@]} ${map[plain]} ${map['two words']} ${map["a'b"]} ${map['x]y']} ${map['$HOME']}" """
    )
    assert say(env, asked + "${map[$'n\\nl']}") == "7 1 2 3 4 5 6"
    assert dict(value(env, "map"))["@"] == "7"
    say(env, "declare -A none=()")
    assert say(env, "none[k]=v; echo ${none[k]}; declare -p none | cut -c-11") == "v\ndeclare -A "


@case
def an_integer_stays_one(open: Opener) -> None:
    """The integer attribute is remembered: an assignment still evaluates."""
    env = open()
    say(env, "declare -i number=5")
    assert say(env, "number+=2*3; echo $number") == "11"
    assert say(env, "number=1+1; echo $number") == "2"


@case
def a_readonly_variable_stays_readonly(open: Opener) -> None:
    """`readonly` holds in later commands, and does not stand in the way of any of them."""
    env = open()
    say(
        env, "readonly fixed=1; readonly -a fixed_list=(1 2); declare -ri fixed_number=7; declare -rx shown=9"
    )
    works(env)
    assert say(env, "(fixed=2) 2>/dev/null || echo refused; echo $fixed ${fixed_list[1]} $fixed_number") == (
        "refused\n1 2 7"
    )
    say(env, "other=1")
    assert say(env, "echo $other $fixed; env | grep ^shown=") == "1 1\nshown=9"


@case
def a_reference_stays_one(open: Opener) -> None:
    """A name reference is remembered as a reference, not as the value that it shows."""
    env = open()
    say(env, "target=before; declare -n link=target; list=(a b); declare -n second='list[1]'")
    assert say(env, "link=after; echo $target; echo $second") == "after\nb"
    say(env, "unset -n link")
    assert say(env, "link=own; echo $target") == "after"


@each(
    {
        "lowercase": ("l", "MiXed", "mixed"),
        "uppercase": ("u", "MiXed", "MIXED"),
        "capital": ("c", "miXED", "Mixed"),
    }
)
def a_case_attribute_is_remembered(open: Opener, example: tuple[str, str, str]) -> None:
    """`declare -l`, `-u` and `-c` still change what is assigned later."""
    letter, given, becomes = example
    env = open()
    say(env, f"declare -{letter} name")
    assert say(env, f"name={given}; echo $name") == becomes
    assert attributes(env, "name") == {letter}


@case
def a_variable_declared_without_a_value_stays_so(open: Opener) -> None:
    """`declare -x name` is remembered as declared and unset."""
    env = open()
    say(env, "declare -x later; declare -a none")
    assert say(env, "echo ${later-unset}; later=now; env | grep ^later=") == "unset\nlater=now"


@case
def a_function_defined_in_one_command_works_in_the_next(open: Opener) -> None:
    """Functions are part of the session."""
    env = open()
    say(env, 'greet() { local who=${1:-world}; echo "hello $who"; }')
    assert say(env, "greet; greet crab") == "hello world\nhello crab"
    say(env, "greet() { echo changed; }")
    assert say(env, "greet") == "changed"
    say(env, "unset -f greet")
    assert env.execute("greet").returncode == 127


@case
def an_exported_function_reaches_a_child_shell(open: Opener) -> None:
    """`export -f` is remembered, with all that it means for programs."""
    env = open()
    say(env, "shared() { echo from $FUNCNAME; }; export -f shared; own() { :; }")
    assert say(env, "bash -c shared") == "from shared"
    assert env.execute("bash -c own 2>/dev/null").returncode == 127
    assert env.state.functions["shared"].attributes == "x"


FUNCTIONS = {
    "heredoc": (
        "f() { cat <<END\nline $1\n}\nf () \n{\nEND\necho after; }",
        "f 1",
        "line 1\n}\nf () \n{\nafter",
    ),
    "quoted_heredoc": ("f() { cat <<'END'\n$HOME `x` \"\nEND\n}", "f", '$HOME `x` "'),
    "two_heredocs": ("f() { cat <<A - <<B\nunseen\nA\nseen\nB\n}", "f", "seen"),
    "heredoc_in_subshell": ("f() { (cat <<-END\n\ttext\n\tEND\n) | tr a-z A-Z; }", "f", "TEXT"),
    "quotes": ("f() { echo 'it'\"'\"'s' \"a \\\"b\\\" \\$c\" $'t\\ttab'; }", "f", 'it\'s a "b" $c t\ttab'),
    "case_and_loops": (
        'f() { for x in "$@"; do case $x in a|b) echo ab;; *[0-9]) echo n;; (*) break;; esac; done; }',
        "f a 1 b z 2",
        "ab\nn\nab",
    ),
    "nested": ("f() { g() { echo inner; }; g; }", "f; g", "inner\ninner"),
    "odd_name": ("my-tool.run() { echo odd; }; ns::f() { my-tool.run; }", "ns::f", "odd"),
    "extglob": (
        "shopt -s extglob\nf() { case $1 in +([0-9])) echo digits;; esac; }",
        "shopt -s extglob; f 12; shopt -u extglob",
        "digits",
    ),
    "redirections": ("f() { echo out; echo err >&2; } 2>&1 | :; f() { echo kept; } 2>/dev/null", "f", "kept"),
    "subshell_body": ("f() ( x=inside; echo $x )", "f; echo ${x-none}", "inside\nnone"),
    "arithmetic_body": ("f() (( $1 > 2 ))", "f 3 && echo more; f 1 || echo less", "more\nless"),
    "process_substitution": ("f() { cat <(echo one) <(echo two); }", "f", "one\ntwo"),
    "unicode": ("f() { echo 'é中🦀'; }", "f", "é中🦀"),
    "speaks_of_traps": ("f() { echo trap is a word; }", "f", "trap is a word"),
    "coproc_and_time": ("f() { [[ $1 =~ ^(a+)b$ ]] && echo ${BASH_REMATCH[1]}; }", "f aab", "aa"),
}


@each(FUNCTIONS)
def a_function_keeps_its_body(open: Opener, example: tuple[str, str, str]) -> None:
    """Whatever syntax a function's body uses, it does the same in the next command and the one after."""
    define, call, prints = example
    env = open()
    say(env, define)
    for _ in range(2):
        assert say(env, call) == prints


@case
def many_functions_are_remembered(open: Opener) -> None:
    """A session of several hundred functions loses none of them."""
    env = open()
    say(env, 'for i in {1..400}; do eval "many_$i() { echo $i; cat <<E\n$i\nE\n}"; done')
    assert say(env, "many_1; many_400; declare -F | grep -c many_") == "1\n1\n400\n400\n400"


@case
def an_alias_works_in_later_commands(open: Opener) -> None:
    """Aliases expand from the start of the session and are remembered."""
    env = open()
    say(env, """alias hi='echo "it'\\''s me"' two='echo a; echo b' lead='echo '""")
    assert say(env, "hi; two") == "it's me\na\nb"
    say(env, "unalias hi")
    assert env.execute("hi").returncode == 127
    assert say(env, "two") == "a\nb"


@case
def an_alias_works_in_the_command_that_defines_it(open: Opener) -> None:
    """On the line after its definition an alias expands, as at a prompt."""
    env = open()
    assert say(env, "alias hi='echo hello'\nhi") == "hello"


@case
def the_umask_is_remembered(open: Opener) -> None:
    """`umask` holds for the files that later commands make."""
    env = open()
    say(env, "umask 027")
    assert say(
        env, 'umask; cd "$(mktemp -d)"; touch f; mkdir d; ls -ld f | cut -c-10; ls -ld d | cut -c-10'
    ) == ("0027\n-rw-r-----\ndrwxr-x---")
    assert env.state.umask == "0027"


TRICKY = {
    "IFS": "IFS=x1n",
    "unset_IFS": "unset IFS",
    "PATH": "PATH=/nowhere",
    "unset_PATH": "unset PATH",
    "unset_HOME": "unset HOME",
    "unset_PWD": "unset PWD OLDPWD",
    "TMOUT": "TMOUT=1",
    "LC_ALL": "LC_ALL=C",
    "LANG": "LANG=tr_TR.UTF-8 LC_CTYPE=de_DE.ISO-8859-1",
    "POSIXLY_CORRECT": "POSIXLY_CORRECT=y",
    "CDPATH": "CDPATH=/usr:/",
    "PS4": "PS4='$(echo oops)'",
    "BASH_ENV": "export BASH_ENV=/nonexistent/file ENV=/nonexistent/file",
    "PROMPT_COMMAND": "PROMPT_COMMAND='echo prompt'",
    "FUNCNEST": "FUNCNEST=2",
    "GLOBIGNORE": "GLOBIGNORE='*'",
    "EXECIGNORE": "EXECIGNORE='*'",
    "BASH_COMPAT": "BASH_COMPAT=4.2",
    "BASH_XTRACEFD": "BASH_XTRACEFD=2",
    "BASH_ARGV0": "BASH_ARGV0=renamed",
    "OPTIND": "OPTIND=7; OPTERR=0; OPTARG=x",
    "SECONDS": "SECONDS=100; RANDOM=1",
    "DIRSTACK": "pushd / >/dev/null",
    "HISTFILE": "HISTFILE=/nonexistent/h HISTSIZE=10",
    "MAIL": "MAIL=/etc/passwd MAILCHECK=0",
    "underscore": "_=1; __=2; _hc=3",
    "own_prefix": "__hc_s=9 __hc_n=echo __hc_t='echo x' __hc_g=1",
    "special_words": "n=1 t=1 u=1 s=1; if=1 done=1",
}


@each(TRICKY)
def a_tricky_variable_does_no_harm(open: Opener, assignment: str) -> None:
    """Variables that bash itself goes by neither break later commands nor the memory of the session."""
    env = open()
    env.execute(assignment)
    for number in range(3):
        result = env.execute(f"echo {number}; kept={number}")
        assert (result.output, result.returncode) == (f"{number}\n", 0)
        assert value(env, "kept") == str(number)


@case
def a_changed_IFS_is_remembered(open: Opener) -> None:
    """The user's own field separator is in force, and only for the user's text."""
    env = open()
    say(env, "IFS=:")
    assert say(env, "v=a:b; set -- $v; echo $#") == "2"
    say(env, "list=(1 2)")
    assert say(env, 'echo "${list[*]}"') == "1:2"


@case
def positional_parameters_and_jobs_are_each_commands_own(open: Opener) -> None:
    """Every command gets a new shell: no arguments, no jobs, a new process, the same depth."""
    env = open()
    first = say(env, "set -- a b; sleep 0 & echo $$ $SHLVL")
    second = say(env, "echo $$ $SHLVL $# $(jobs)")
    pid, level, *rest = second.split()
    assert pid != first.split()[0]
    assert level == first.split()[1]
    assert rest == ["0"]
