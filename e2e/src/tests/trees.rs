//! Whole trees: as tar streams, through `keiki cp`, and watched.

use super::refused;
use crate::{World, patience, sandbox::Sandbox, within};
use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use keiki_client::{Unpacking, api::FsEvent};
use std::{sync::Arc, time::Duration};
use tokio::process::Command;

const MAKE: &str = "mkdir -p /root/t/deep/er && cd /root/t && echo one > a && chmod 4751 a && ln a b && ln -s a c && \
    ln -s /etc d && truncate -s 64M holes && printf end >> holes && touch -d @1000000 deep && mkdir empty && \
    chmod 1700 empty && chown 12:34 empty a && mkfifo pipe && touch 'odd \n name'";
const LIST: &str =
    "cd %; find . ! -type p -printf '%P %y %m %U:%G %s %l|' | sort -z; stat -c %Y deep; stat -c %h a";

async fn archive(sandbox: &Sandbox, path: &str) -> Result<Vec<u8>> {
    let chunks = sandbox.client.read_archive(sandbox.id, path).await?;
    let all = chunks.try_fold(Vec::new(), |mut all, chunk| async move {
        all.extend_from_slice(&chunk);
        Ok(all)
    });
    Ok(all.await?)
}

fn whole(data: Vec<u8>) -> impl futures::Stream<Item = std::io::Result<Bytes>> + Send + 'static {
    let pieces: Vec<_> = data.chunks(50_000).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect();
    stream::iter(pieces)
}

pub async fn a_tree_moves_whole_from_one_to_another(world: Arc<World>) -> Result<()> {
    let from = Sandbox::create(&world.node.client).await?;
    let to = Sandbox::create(&world.node.client).await?;
    from.sh(MAKE).await?;
    let tar = archive(&from, "/root/t").await?;
    ensure!(tar.len() < 4 << 20, "holes were sent: {} bytes", tar.len());
    let how = Unpacking { owners: true, strip_top: false };
    let unpacked = to.client.write_archive(to.id, "/root", how, whole(tar.clone())).await?;
    ensure!(unpacked.files == 4 && unpacked.symlinks == 2 && unpacked.dirs == 4, "{unpacked:?}");
    let list = LIST.replace('%', "\u{0}").replacen('\u{0}', "/root/t", 1).replace('\u{0}', "%");
    let (theirs, ours) = (from.sh(&list).await?, to.sh(&list).await?);
    ensure!(theirs == ours, "it changed:\n{theirs}\n{ours}");
    // A truncated archive leaves nothing.
    let half = tar.len() / 1024 * 512;
    let cut = stream::iter([Ok(Bytes::copy_from_slice(&tar[..half])), Err(std::io::Error::other("cut"))]);
    to.sh("mkdir /root/cut").await?;
    let broken = to.client.write_archive(to.id, "/root/cut", how, cut).await;
    ensure!(broken.is_err(), "a cut archive was taken");
    let empty = to.client.write_archive(to.id, "/root/cut", how, whole(tar[..half].to_vec())).await;
    refused(empty, 400, "incomplete")?;
    let mut left = String::new();
    for _ in 0..50 * patience() {
        left = to.sh("ls -A /root/cut").await?;
        if left.is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    ensure!(left.is_empty(), "left behind: {left}");
    refused(to.client.read_archive(to.id, "/nope").await.map(drop), 404, "/nope")?;
    refused(to.client.write_archive(to.id, "/nope", how, whole(tar.clone())).await, 404, "/nope")?;
    refused(to.client.write_archive(to.id, "/etc/passwd", how, whole(tar)).await, 400, "not a directory")?;
    Ok(())
}

pub async fn hostile_archives_write_nothing(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let (client, id) = (&sandbox.client, sandbox.id);
    let make = r#"
import tarfile, io
def tar(name, *entries):
    with tarfile.open('/root/' + name, 'w') as t:
        for path, kind, link in entries:
            i = tarfile.TarInfo(path)
            i.type, i.linkname, i.size = kind, link, 1 if kind == tarfile.REGTYPE else 0
            t.addfile(i, io.BytesIO(b'x'))
R, S, L, D, C = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE
tar('up', ('ok', R, ''), ('../out', R, ''))
tar('abs', ('/tmp/out', R, ''))
tar('sym', ('s', S, '/tmp'), ('s/out', R, ''))
tar('hard', ('h', L, '/etc/passwd'))
tar('dev', ('ok', R, ''), ('null', C, ''))
"#;
    client.write_bytes(id, "/root/make.py", None, Bytes::from(make)).await?;
    sandbox.sh("python3 /root/make.py; mkdir /root/into; truncate -s 8G /root/bomb.dat").await?;
    for (name, why) in [
        ("up", "leads out"),
        ("abs", "absolute"),
        ("sym", "symbolic link"),
        ("hard", "absolute"),
        ("dev", "device"),
    ] {
        let reader = client.read_file(id, &format!("/root/{name}")).await?;
        let data: Vec<Bytes> = reader.chunks.try_collect().await?;
        let answer = client.write_archive(id, "/root/into", Unpacking::default(), whole(data.concat())).await;
        refused(answer, 400, why).with_context(|| name.to_owned())?;
        let left = sandbox.sh("ls -A /root/into; ls /tmp/out /root/out 2>/dev/null || true").await?;
        ensure!(left.is_empty(), "{name} left {left:?}");
    }
    // An archive that does not fit is rejected before it fills the disk.
    let mut header = vec![0u8; 512];
    header[..4].copy_from_slice(b"bomb");
    header[100..107].copy_from_slice(b"0000644");
    header[124..135].copy_from_slice(b"77777777777");
    header[156] = b'0';
    header[257..263].copy_from_slice(b"ustar\0");
    header[263..265].copy_from_slice(b"00");
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
    header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    let noise = Bytes::from(vec![7u8; 1 << 20]);
    let bomb = stream::iter([Ok(Bytes::from(header))]).chain(stream::repeat_with(move || Ok(noise.clone())));
    sandbox.sh("mkdir /run/small && mount -t tmpfs -o size=24M none /run/small").await?;
    let answer = client.write_archive(id, "/run/small", Unpacking::default(), bomb).await;
    refused(answer, 507, "that are free")?;
    ensure!(sandbox.sh("ls -A /run/small").await?.is_empty(), "the bomb left something");
    Ok(())
}

/// Copies both ways as a person would, with the expected local result.
pub async fn cp_copies_trees_both_ways(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let id = sandbox.id;
    let home = world.places.file("cp.txt", "x")?;
    let home = std::path::Path::new(&home).with_file_name("cp");
    let _ = std::fs::remove_dir_all(&home);
    std::fs::create_dir(&home)?;
    let keiki = async |line: String| -> Result<(bool, Vec<u8>, String)> {
        let done = Command::new("sh")
            .args(["-c", &line])
            .current_dir(&home)
            .env("KEIKI", world.places.program("keiki"))
            .env("KEIKI_URL", sandbox.client.url())
            .output()
            .await?;
        Ok((done.status.success(), done.stdout, String::from_utf8_lossy(&done.stderr).into_owned()))
    };
    let local = "mkdir -p src/sub && echo hi > src/sub/f && chmod 640 src/sub/f && ln src/sub/f src/g && \
                 ln -s sub/f src/l && printf x > \"src/$(printf 'n\\377')\"";
    ensure!(keiki(local.into()).await?.0, "the local tree");
    let (ok, _, said) =
        keiki(format!("\"$KEIKI\" cp src {id}:/root/dst && \"$KEIKI\" cp src {id}:/root")).await?;
    ensure!(ok, "{said}");
    for dir in ["/root/dst", "/root/src"] {
        let seen = sandbox.sh(&format!("cd {dir}; cat g l; stat -c '%a %h %U' g; ls | wc -l")).await?;
        ensure!(seen == "hi\nhi\n640 2 root\n4", "{dir}: {seen:?}");
    }
    let (ok, _, said) = keiki(format!("\"$KEIKI\" cp {id}:/root/dst back && diff -r src back")).await?;
    ensure!(ok, "{said}");
    let links = keiki("stat -c '%a %h' back/g; readlink back/l".into()).await?.1;
    ensure!(links == b"640 2\nsub/f\n", "{}", String::from_utf8_lossy(&links));
    // Through a pipe, as `docker cp` does.
    let piped = format!(
        "\"$KEIKI\" cp {id}:/root/dst - | tar -tf - | grep -c ^dst/ && tar -cf - -C src . | \"$KEIKI\" cp - {id}:/root/empty"
    );
    sandbox.sh("mkdir /root/empty").await?;
    let (ok, out, said) = keiki(piped).await?;
    ensure!(ok && out == b"6\n", "{out:?} {said}");
    ensure!(sandbox.sh("cat /root/empty/sub/f").await? == "hi", "from standard input");
    // What a sandbox must not do here.
    sandbox.sh("mkdir /root/evil; cd /root/evil; ln -s /tmp x; cp /bin/true suid; chmod 6755 suid").await?;
    let (ok, out, said) =
        keiki(format!("\"$KEIKI\" cp {id}:/root/evil evil && stat -c %a evil/suid && readlink evil/x"))
            .await?;
    ensure!(ok && out == b"755\n/tmp\n", "{:?} {said}", String::from_utf8_lossy(&out));
    let (ok, _, said) = keiki(format!("\"$KEIKI\" cp {id}:/nope there; test ! -e there && exit 3")).await?;
    ensure!(!ok && said.contains("/nope"), "{said}");
    std::fs::remove_dir_all(&home)?;
    Ok(())
}

pub async fn changes_are_told(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let (client, id) = (&sandbox.client, sandbox.id);
    sandbox.sh("mkdir -p /root/w/sub").await?;
    refused(client.watch(id, "/nope", true).await.map(drop), 404, "/nope")?;
    let mut events = client.watch(id, "/root/w", true).await?;
    let mut until = async |kind: &str, path: &str| -> Result<FsEvent> {
        let find = async {
            loop {
                match events.next().await {
                    Some(event) => {
                        let event = event?;
                        if event.kind == kind && event.path == path {
                            return Ok(event);
                        }
                    }
                    None => bail!("the stream ended before {kind} {path}"),
                }
            }
        };
        let found = tokio::time::timeout(within(15), find).await;
        found.with_context(|| format!("{kind} {path} was not told"))?
    };
    until("ready", "/root/w").await?;
    sandbox.sh("echo x > /root/w/sub/é; mv /root/w/sub/é /root/w/b; mkdir -p /root/w/new/er").await?;
    until("created", "/root/w/sub/é").await?;
    until("closed", "/root/w/sub/é").await?;
    let moved = until("moved", "/root/w/b").await?;
    ensure!(moved.from.as_deref() == Some("/root/w/sub/é"), "{moved:?}");
    until("created", "/root/w/new/er").await?;
    sandbox.sh("touch /root/w/new/er/f; rm -r /root/w/new").await?;
    until("removed", "/root/w/new").await?;
    sandbox.sh("rm -r /root/w").await?;
    until("removed", "/root/w").await?;
    ensure!(events.next().await.is_none(), "something comes after its end");
    Ok(())
}

/// Files that are waiting for more data are closed where they are.
pub async fn files_that_wait_are_read_to_where_they_are(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let read = async {
        let reader = sandbox.client.read_file(sandbox.id, "/proc/kmsg").await?;
        let chunks: Vec<Bytes> = reader.chunks.try_collect().await?;
        anyhow::Ok(chunks.concat().len())
    };
    tokio::time::timeout(within(20), read).await.context("it waits for ever")??;
    Ok(())
}
