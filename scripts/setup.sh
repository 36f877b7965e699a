#!/usr/bin/env bash
# Installs what building and running needs, on Debian. Idempotent; prints nothing when nothing is missing.
#
# Installs no recommended packages and removes none. apt runs with private sources, lists and archives under
# .keiki/apt: the host's apt configuration stays as it is. The mirror is the one that the host uses.
. "$(dirname "$0")/lib.sh"

# Required commands, each with its package.
TOOLS=(
    qemu-system-x86_64:qemu-system-x86 qemu-img:qemu-utils
    mmdebstrap:mmdebstrap mkfs.ext4:e2fsprogs debugfs:e2fsprogs mkfs.xfs:xfsprogs depmod:kmod xz:xz-utils
    cpio:cpio nft:nftables ip:iproute2 losetup:mount setpriv:util-linux
    python3:python3 gcc:gcc pkg-config:pkg-config make:make
)
QEMU=(qemu-system-x86 qemu-utils)
# Required packages without a command.
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

# The host's apt sources: LABEL|URI|SUITE, one per line. Labels are known only after lists were fetched; in a fresh
# container only the addresses are.
sources() {
    apt-get indextargets --format '$(LABEL)|$(REPO_URI)|$(RELEASE)' 2>/dev/null || true
    apt-get update --print-uris 2>/dev/null | sed -n "s,^'\\(.*\\)/dists/\\([^/ ]*\\)/InRelease'.*,|\\1|\\2,p"
}

# The Debian archive that the host uses, found by its label, or else by its path.
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

# A private apt configuration; the database of installed packages is the host's.
configure_apt() {
    local mirror suite=$1 signed=
    mirror=$(mirror)
    [ -n "$mirror" ] || die "apt has no Debian mirror configured: add one, or set KEIKI_DEBIAN_MIRROR"
    [ -f "$KEYRING" ] && signed="[signed-by=$KEYRING] "
    mkdir -p "$APT/lists/partial" "$APT/archives/partial"
    {
        printf 'deb %s%s %s main\n' "$signed" "$mirror" "$suite" "$signed" "$mirror" "$suite-updates"
        [ "$BACKPORTS" = no ] || printf 'deb %s%s %s main\n' "$signed" "$mirror" "$suite-backports"
        # Include the host's security updates, if it has them: packages installed from there must not conflict.
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

# install OPTION... PACKAGE...: simulates first, and fails if a package would be removed.
install() {
    local plan
    plan=$(apt-get -s --no-install-recommends install "$@" 2>&1) || { printf '%s\n' "$plan" | tail -n 15 >&2; return 1; }
    if printf '%s\n' "$plan" | grep -q '^Remv '; then
        printf '%s\n' "$plan" | grep '^Remv ' >&2
        say "setup: installing $* would remove the packages above; nothing was changed" >&2
        return 1
    fi
    say "setup: installing $(printf '%s\n' "$plan" | grep -c '^Inst ') packages"
    quietly setup apt-get -y -q --no-install-recommends --no-remove \
        -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold install "$@"
}

# QEMU's packages must come from one suite: they conflict otherwise, and the snapshot format depends on the version.
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
    # Takes a tenth of a second when nothing is missing.
    local list others
    list=$(missing | sort -u)
    [ -n "$list" ] || return 0
    have apt-get || die "not a Debian system: install $(printf '%s' "$list" | tr '\n' ' ')manually, then run this again"
    [ "$(id -u)" = 0 ] || die "packages are missing ($(printf '%s' "$list" | tr '\n' ' ')): run this as root"
    CODENAME=$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-}")
    # Debian 12 has QEMU 7.2, and 10.0 in its backports; Debian 13 has 10.0.
    BACKPORTS=no
    [ "$CODENAME" = bookworm ] && BACKPORTS=yes
    say "setup: missing $(printf '%s' "$list" | tr '\n' ' ')"
    configure_apt "$CODENAME"
    say "setup: reading the package lists"
    quietly setup apt-get update -q || die "cannot read the package lists (network?); see .keiki/setup.log"
    others=$(printf '%s\n' "$list" | grep -v '^qemu-' || true)
    # shellcheck disable=SC2086 # one word per package
    [ -z "$others" ] || install $others || die "cannot install packages; see .keiki/setup.log"
    if printf '%s\n' "$list" | grep -q '^qemu-'; then
        install_qemu || die "cannot install QEMU; see .keiki/setup.log"
    fi
    # Lists and downloads are no longer needed.
    rm -rf "$APT"
    list=$(missing | sort -u)
    [ -z "$list" ] || die "still missing after installing: $(printf '%s' "$list" | tr '\n' ' ')"
    say "setup: done"
}

main
