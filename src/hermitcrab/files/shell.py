"""The tools of `tools.py` in a sandbox whose agent has none: bash, and the tar, find and stat of the sandbox.

GNU's programs do all of it; Busybox's do, as long as the names that `pack` is given fit on a command line.
"""

from __future__ import annotations

from collections.abc import Sequence

_PRELUDE = r"""
export LC_ALL=C
no () { printf %s "$1" >&2; exit "${2-1}"; }
need () {
  local each
  for each; do
    type -P $each >/dev/null || no "there is no $each in the sandbox: install it there to transfer trees"
  done
}
there () { [[ -e $1 || -L $1 ]] || no 'No such file or directory' 3; }
enter () {
  there "$1"
  [[ -d $1 ]] || no 'Not a directory'
  cd -P -- "$1" || exit
}
gnu () { [[ $($1 --version 2>/dev/null) == *GNU* ]]; }
record='%m %s %T@ %C@ %i %P\0%l\0'
records=(-type d ! '(' -readable -executable ')' -printf "D $record" -prune -o -printf "%y $record")
told () {
  local kind=o mode size changed noted inode times
  if [[ -L $1 ]]; then kind=l; elif [[ -d $1 ]]; then kind=d; elif [[ -f $1 ]]; then kind=f; fi
  if [[ $kind == d && ! ( -r $1 && -x $1 ) ]]; then kind=D; fi
  times=$(stat ${follow-} -c '%a %s %Y %Z %i' -- "$1") || return 0
  read -r mode size changed noted inode <<<"$times"
  [[ ! ${follow-} || $kind != l ]] || { if [[ -d $1 ]]; then kind=d; else kind=f; fi; }
  printf '%s %s %s %s %s %s %s\0' $kind $mode $size $changed $noted $inode "$2"
  if [[ $kind == l ]]; then readlink -n -- "$1"; fi
  printf '\0'
}
"""

_STAT = r"""
need stat readlink
follow=; (($1)) && follow=-L
[[ ! $follow || -e $2 ]] || no 'No such file or directory' 3
there "$2"
told "$2" "$2"
"""

_LIST = r"""
enter "$1"
if gnu find; then
  exec find . -mindepth 1 -maxdepth 1 "${records[@]}"
fi
need stat readlink
shopt -s dotglob nullglob
for each in *; do told "./$each" "$each"; done
"""

_WALK = r"""
enter "$1"
if gnu find; then exec find . -mindepth 1 "${records[@]}"; fi
need stat readlink
shopt -s dotglob nullglob
walk () {
  local each
  for each in "$1"*; do
    told "./$each" "$each"
    if [[ -d $each && ! -L $each && -r $each && -x $each ]]; then walk "$each/"; fi
  done
}
walk ''
"""

_MKDIR = r"""
need mkdir
(($2)) && parents=-p
exec mkdir ${parents-} ${1:+-m "$1"} -- "$3"
"""

_REMOVE = r"""
if (($2)); then [[ -e $3 || -L $3 ]] || exit 0; fi
there "$3"
need rm rmdir
if [[ -L $3 || ! -d $3 ]]; then exec rm -f -- "$3"; fi
if (($1)); then exec rm -rf -- "$3"; fi
exec rmdir -- "$3"
"""

_REMOVE_MANY = r"""
enter "$1"
need rm
batch=()
while IFS= read -r -d '' name; do
  batch+=("./$name")
  if ((${#batch[@]} == 500)); then rm -rf -- "${batch[@]}" || exit; batch=(); fi
done
((${#batch[@]} == 0)) || exec rm -rf -- "${batch[@]}"
"""

# A file that changes while it is read is no failure to GNU tar, but its status 1.
_PACK = r"""
need tar
named=$1
enter "$2"
shift 2
pruned=()
for each; do
  each=${each//\\/\\\\}; each=${each//\*/\\*}; each=${each//\?/\\?}; each=${each//\[/\\[}
  pruned+=(-path "./$each" -prune -o)
done
those () {
  local name
  if ((named)); then
    while IFS= read -r -d '' name; do
      if [[ -L $name || -d $name || ( -f $name && -r $name ) ]]; then printf './%s\0' "$name"; fi
    done
  else
    need find
    find . -mindepth 1 "${pruned[@]}" \( -type f -o -type d -o -type l \) -print0
  fi
}
if gnu tar; then
  those | tar --null --no-recursion --hard-dereference -T - -cf -
  ends=("${PIPESTATUS[@]}")
  ((ends[0] == 0 && ends[1] < 2))
elif ((named || $#)); then
  mapfile -d '' chosen < <(those)
  exec tar --no-recursion -cf - "${chosen[@]}"
else
  exec tar -cf - .
fi
"""

# All of it arrives in a directory beside; then each file takes its place in one step.
_UNPACK = r"""
need tar mkdir mv rm chmod
owners=--no-same-owner; (($1)) && owners=--same-owner
mkdir -p -- "$2" || exit
enter "$2"
shopt -s dotglob nullglob
printf -v new ./.hermitcrab-%08x%04x%04x $BASHPID $RANDOM $RANDOM
trap 'chmod -R u+rwx "$new" 2>/dev/null; rm -rf -- "$new"' EXIT
trap 'exit 143' TERM HUP
mkdir -m 700 -- "$new" || exit
tar -C "$new" $owners -xpf - || exit
settle () {
  local each name plain=() deeper=() mode from=$new/$1
  for each in "$from"*; do
    name=$1${each##*/}
    if [[ -L $each || ! -d $each ]]; then
      [[ -L ./$name || ! -d ./$name ]] || no "$name: in its place is a directory"
    elif [[ -e ./$name || -L ./$name || ! -w $each ]]; then
      deeper+=("$name")
      continue
    fi
    plain+=("$each")
  done
  ((${#plain[@]} == 0)) || mv -f -- "${plain[@]}" "./$1" || exit
  for name in "${deeper[@]}"; do
    need stat
    [[ ! -L ./$name && ( -d ./$name || ! -e ./$name ) ]] || no "$name: in its place is no directory"
    mode=$(stat -c %a -- "$new/$name") && chmod u+rwx -- "$new/$name" || exit
    [[ -d ./$name ]] || mkdir -- "./$name" || exit
    settle "$name/"
    chmod "$mode" -- "./$name" || exit
  done
}
settle ''
"""

_SCRIPTS = {
    "stat": _STAT,
    "list": _LIST,
    "walk": _WALK,
    "mkdir": _MKDIR,
    "remove": _REMOVE,
    "remove-many": _REMOVE_MANY,
    "pack": _PACK,
    "unpack": _UNPACK,
}


def argv(verb: str, arguments: Sequence[str]) -> list[str]:
    """The same tool, in bash."""
    return ["bash", "-pc", _PRELUDE + _SCRIPTS[verb], "bash", *arguments]
