# What the scripts share: how they speak, and how they install Debian packages. Sourced, not run.

say() { echo "==> $*" >&2; }
note() { echo "    $*" >&2; }
die() { echo "${0##*/}: $*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

installed() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

# What to put in front of apt-get; fails when this user may not install anything.
privilege() {
    have apt-get || return 1
    if [ "$(id -u)" = 0 ]; then echo env; return; fi
    have sudo && sudo -n true 2>/dev/null && echo "sudo -n env"
}

apt_install() {
    as_root=$(privilege) || return 1
    say "installing Debian packages: $*"
    log=$(mktemp)
    # The package lists of a fresh image are empty or old, so they are fetched when the first try fails.
    if try_apt >"$log" 2>&1 "$@" || { $as_root apt-get update >>"$log" 2>&1; try_apt >>"$log" 2>&1 "$@"; }; then
        rm -f "$log"
    else
        tail -n 5 "$log" >&2
        rm -f "$log"
        return 1
    fi
}

# Another script may be installing at the same time: wait for it.
try_apt() {
    $as_root DEBIAN_FRONTEND=noninteractive \
        apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@"
}

# Installs those of the packages that are missing, or ends the script.
need() {
    missing=
    for package; do installed "$package" || missing="$missing $package"; done
    # shellcheck disable=SC2086
    [ -z "$missing" ] || apt_install $missing || die "missing, and not installable here:$missing"
}

# wait_until SECONDS COMMAND...: fails when the command has not succeeded by then.
wait_until() {
    deadline=$(($(date +%s) + $1))
    shift
    until "$@"; do
        [ "$(date +%s)" -lt "$deadline" ] || return 1
        sleep 0.05
    done
}

# Whether containers can have their layers in this directory: overlayfs itself and NFS do not carry overlayfs.
overlay_works() {
    as_root=$(privilege) || return 1
    probe=$(mktemp -d "$1/probe.XXXXXX")
    mkdir "$probe/lower" "$probe/upper" "$probe/work" "$probe/merged"
    works=no
    options=lowerdir=$probe/lower,upperdir=$probe/upper,workdir=$probe/work
    if $as_root mount -t overlay overlay -o "$options" "$probe/merged" 2>/dev/null; then
        $as_root umount "$probe/merged"
        works=yes
    fi
    $as_root rm -rf "$probe"
    [ "$works" = yes ]
}
