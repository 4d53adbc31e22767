#!/bin/sh
# Builds the image with buildah, without a daemon and without a registry.
#
#   hack/image.sh [-t localhost/prebook:dev] [-o build/image/prebook.tar]
#
# Where BASE and BUILDER are not set, both are made here from Debian's Python packages (needs apt-get; Debian 12 or a relative of it).
# Wheels are fetched by this machine's own pip, so its index, certificates and cache apply, and the build itself needs no network.
# Set PREBOOK_IMAGE_STORE to keep buildah's storage elsewhere.
set -eu
cd "$(dirname "$0")/.."

tag=localhost/prebook:dev
out=build/image/prebook.tar
while getopts t:o: option; do
    case $option in
        t) tag=$OPTARG ;;
        o) out=$OPTARG ;;
        *) exit 2 ;;
    esac
done

work=$PWD/build/image
mkdir -p "$work" "$(dirname "$out")"
store=${PREBOOK_IMAGE_STORE:-$work/store}
run=$work/run

# One build at a time: they share the storage.
exec 9>"$work/lock"
flock 9

say() { printf '%s\n' "image: $*" >&2; }
build() { buildah --root "$store" --runroot "$run" --storage-driver vfs "$@"; }

# A root file system with Python and what it links to, and nothing else.
make_base() {
    rm -rf "$work/rootfs" "$work/debs"
    mkdir -p "$work/rootfs" "$work/debs"
    say "fetching Debian's Python"
    (cd "$work/debs" && apt-get -q -o APT::Sandbox::User=root download \
        base-files netbase media-types ca-certificates libc6 libgcc-s1 libcrypt1 zlib1g libssl3 libffi8 libexpat1 libbz2-1.0 \
        liblzma5 libuuid1 libsqlite3-0 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib >/dev/null)
    for deb in "$work"/debs/*.deb; do dpkg-deb --extract "$deb" "$work/rootfs"; done
    rm -rf "$work/rootfs/usr/share/doc" "$work/rootfs/usr/share/man" "$work/rootfs/usr/share/lintian"
    mkdir -p "$work/rootfs/etc/ssl/certs" "$work/rootfs/tmp"
    chmod 1777 "$work/rootfs/tmp"
    cat "$work"/rootfs/usr/share/ca-certificates/mozilla/*.crt >"$work/rootfs/etc/ssl/certs/ca-certificates.crt"
    ln -sf python3.11 "$work/rootfs/usr/bin/python3"
    printf 'root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/tmp:/sbin/nologin\n' >"$work/rootfs/etc/passwd"
    printf 'root:x:0:\nnonroot:x:65532:\n' >"$work/rootfs/etc/group"
    commit_rootfs localhost/prebook-base
    mkdir -p "$work/rootfs/usr/lib/python3/dist-packages"
    cp -R "$work"/tools/lib/python3*/site-packages/pip "$work/rootfs/usr/lib/python3/dist-packages/"
    commit_rootfs localhost/prebook-builder
    rm -rf "$work/rootfs" "$work/debs"
}

# commit_rootfs NAME: the root file system as it is now, as an image.
commit_rootfs() {
    container=$(build from scratch)
    build add -q "$container" "$work/rootfs/" / >/dev/null
    build config --env PATH=/usr/local/bin:/usr/bin:/bin --env SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt "$container"
    build commit -q --rm "$container" "$1" >/dev/null
}

# What decides the image's content; nothing is done when that has not changed.
stamp=$({
    echo "$tag ${BASE:-} ${BUILDER:-}"
    find Dockerfile .dockerignore LICENSE README.md pyproject.toml hack/image.sh hack/image-requirements.txt hack/image-build-requirements.txt operator connector bench \
        -type f ! -name '*.pyc' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
} | sha256sum | cut -d' ' -f1)
if [ -f "$out" ] && [ "$(cat "$out.stamp" 2>/dev/null)" = "$stamp" ]; then
    touch "$out" # for whoever compares times
    say "$tag in $out is up to date"
    exit 0
fi

if [ ! -x "$work/tools/bin/pip" ]; then
    python3 -m venv "$work/tools"
fi
lists="hack/image-requirements.txt hack/image-build-requirements.txt"
if ! cat $lists | cmp -s - "$work/wheels/requirements.txt"; then
    say "fetching wheels"
    rm -rf "$work/wheels"
    for list in $lists; do
        "$work/tools/bin/pip" download -q --python-version 3.11 --only-binary :all: --dest "$work/wheels" \
            --require-hashes --requirement "$list"
    done
    cat $lists >"$work/wheels/requirements.txt"
fi

if [ -z "${BASE:-}" ] && ! build inspect --type image localhost/prebook-base >/dev/null 2>&1; then
    make_base
fi

say "building $tag"
build bud -q --isolation chroot --layers=false --volume "$work/wheels:/wheels:ro" \
    --build-arg PIP_NO_INDEX=1 --build-arg PIP_FIND_LINKS=/wheels \
    --build-arg "BUILDER=${BUILDER:-localhost/prebook-builder}" --build-arg "BASE=${BASE:-localhost/prebook-base}" \
    --tag "$tag" . >/dev/null
build rmi --prune >/dev/null # the image that had the tag before

say "writing $out"
rm -f "$out" "$out.stamp"
build push -q "$tag" "docker-archive:$out:$tag"
echo "$stamp" >"$out.stamp"
say "$tag in $out ($(du -h "$out" | cut -f1))"
