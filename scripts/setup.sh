#!/usr/bin/env bash
# Installs what building and running needs, on Debian. Idempotent; says nothing when there is nothing to do.
#
# Packages come without recommended ones, and none is ever removed. apt runs with sources, lists and archives of our
# own under .keiki/apt: the host's apt configuration stays as it is. The mirror is the one the host itself uses.
. "$(dirname "$0")/lib.sh"

# What must be there, by command and by package.
TOOLS=(
    qemu-system-x86_64:qemu-system-x86 qemu-img:qemu-utils
    mmdebstrap:mmdebstrap mkfs.ext4:e2fsprogs debugfs:e2fsprogs mkfs.xfs:xfsprogs depmod:kmod xz:xz-utils
    cpio:cpio nft:nftables ip:iproute2 losetup:mount setpriv:util-linux
    python3:python3 gcc:gcc pkg-config:pkg-config make:make
)
QEMU=(qemu-system-x86 qemu-utils)
# Without a command of their own.
PLAIN=(busybox-static libc6-dev python3-venv ca-certificates debian-archive-keyring)
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg
APT=$STATE/apt

installed() { [ "$(dpkg-query -W -f '${db:Status-Abbrev}' "$1" 2>/dev/null)" = "ii " ]; }

missing() {
    local pair
    for pair in "${TOOLS[@]}"; do
        have "${pair%%:*}" || printf '%s\n' "${pair##*:}"
    done
    have dpkg-query || return 0
    for pair in "${PLAIN[@]}"; do
        installed "$pair" || printf '%s\n' "$pair"
    done
}

# What the host's apt would read: LABEL|URI|SUITE, one a line. Labels are known only where lists were fetched once;
# elsewhere, as in a fresh container, the addresses alone are.
sources() {
    apt-get indextargets --format '$(LABEL)|$(REPO_URI)|$(RELEASE)' 2>/dev/null || true
    apt-get update --print-uris 2>/dev/null | sed -n "s,^'\\(.*\\)/dists/\\([^/ ]*\\)/InRelease'.*,|\\1|\\2,p"
}

# The Debian archive the host uses: by its label, else by its path.
mirror() {
    if [ -n "${KEIKI_DEBIAN_MIRROR:-}" ]; then
        printf '%s\n' "${KEIKI_DEBIAN_MIRROR%/}"
        return
    fi
    sources | awk -F'|' '$3 ~ /-security$/ { next }
        { sub("/+$", "", $2) }
        $1 == "Debian" { print 1, $2 }
        $1 == "" && $2 ~ /\/debian$/ { print 2, $2 }' | sort -s -k1,1n | head -n 1 | cut -d' ' -f2
}

# apt with a configuration of our own; what is installed is still the host's to know.
configure_apt() {
    local mirror suite=$1 signed=
    mirror=$(mirror)
    [ -n "$mirror" ] || die "this host's apt knows no Debian mirror: add one, or set KEIKI_DEBIAN_MIRROR"
    [ -f "$KEYRING" ] && signed="[signed-by=$KEYRING] "
    mkdir -p "$APT/lists/partial" "$APT/archives/partial"
    {
        printf 'deb %s%s %s main\n' "$signed" "$mirror" "$suite" "$signed" "$mirror" "$suite-updates"
        [ "$BACKPORTS" = no ] || printf 'deb %s%s %s main\n' "$signed" "$mirror" "$suite-backports"
        # With the host's security updates where it has them: what it installed from there must not be in the way.
        sources | awk -F'|' -v suite="$suite-security" '$3 == suite && !seen++ { print $2 }' |
            while read -r uri; do printf 'deb %s%s %s main\n' "$signed" "$uri" "$suite-security"; done
    } >"$APT/sources.list"
    {
        printf 'Dir::Etc::parts "/dev/null";\nDir::Etc::main "/dev/null";\nDir::Etc::sourceparts "/dev/null";\n'
        printf 'Dir::Etc::preferences "/dev/null";\nDir::Etc::preferencesparts "/dev/null";\n'
        printf 'Dir::Etc::sourcelist "%s/sources.list";\n' "$APT"
        printf 'Dir::State::lists "%s/lists";\nDir::Cache "%s";\n' "$APT" "$APT"
        printf 'Dir::Cache::archives "%s/archives";\n' "$APT"
        printf 'Dir::Cache::pkgcache "";\nDir::Cache::srcpkgcache "";\n'
        printf 'Acquire::Languages "none";\nAPT::Sandbox::User "";\nDPkg::Lock::Timeout "300";\n'
        printf 'APT::Update::Error-Mode "any";\n'
        apt-config dump | grep -E '^Acquire::(http|https)::|^Acquire::(Retries|ForceIPv)' || true
    } >"$APT/apt.conf"
    export APT_CONFIG=$APT/apt.conf DEBIAN_FRONTEND=noninteractive
}

# install OPTION... PACKAGE...: tells first what would happen, and refuses what would take something away.
install() {
    local plan
    plan=$(apt-get -s --no-install-recommends install "$@" 2>&1) || { printf '%s\n' "$plan" | tail -n 15 >&2; return 1; }
    if printf '%s\n' "$plan" | grep -q '^Remv '; then
        printf '%s\n' "$plan" | grep '^Remv ' >&2
        say "setup: installing $* would remove the packages above; nothing was done" >&2
        return 1
    fi
    say "setup: installing $(printf '%s\n' "$plan" | grep -c '^Inst ') packages"
    quietly setup apt-get -y -q --no-install-recommends --no-remove \
        -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold install "$@"
}

# QEMU's parts must be of one suite: they conflict otherwise, and the snapshot format is the version's.
install_qemu() {
    local version
    version=$(dpkg-query -W -f '${Version}' qemu-utils 2>/dev/null || true)
    case $version in
    *~bpo*) install -t "$CODENAME-backports" "${QEMU[@]}" ;;
    ?*) install "${QEMU[@]}" ;;
    *) [ "$BACKPORTS" = yes ] && install -t "$CODENAME-backports" "${QEMU[@]}" || install "${QEMU[@]}" ;;
    esac
}

main() {
    have cargo || die "Rust is missing: install it with rustup (https://rustup.rs), then run this again"
    # Commands are looked up and a few packages asked for: a tenth of a second when nothing is missing.
    local list others
    list=$(missing | sort -u)
    [ -n "$list" ] || return 0
    have apt-get || die "this is no Debian: install $(printf '%s' "$list" | tr '\n' ' ')by hand, then run this again"
    [ "$(id -u)" = 0 ] || die "packages are missing ($(printf '%s' "$list" | tr '\n' ' ')): run this as root"
    CODENAME=$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-}")
    # Debian 12's own QEMU is 7.2; its backports have 10.0, which Debian 13 has itself.
    BACKPORTS=no
    [ "$CODENAME" = bookworm ] && BACKPORTS=yes
    say "setup: missing $(printf '%s' "$list" | tr '\n' ' ')"
    configure_apt "$CODENAME"
    say "setup: reading the package lists"
    quietly setup apt-get update -q || die "the package lists could not be read (network?); see .keiki/setup.log"
    others=$(printf '%s\n' "$list" | grep -v '^qemu-' || true)
    # shellcheck disable=SC2086 # one word per package
    [ -z "$others" ] || install $others || die "packages could not be installed; see .keiki/setup.log"
    if printf '%s\n' "$list" | grep -q '^qemu-'; then
        install_qemu || die "QEMU could not be installed; see .keiki/setup.log"
    fi
    # Lists and downloads were needed once.
    rm -rf "$APT"
    list=$(missing | sort -u)
    [ -z "$list" ] || die "still missing after installing: $(printf '%s' "$list" | tr '\n' ' ')"
    say "setup: done"
}

main
