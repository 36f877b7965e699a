//! tmp
#![allow(missing_docs, unused, clippy::all)]
use crate::*;
use keiki_sys::{process::Process, reflink, pagemap};
use std::{collections::HashMap, sync::Mutex, process::{Command, Stdio, Child}, os::unix::fs::{FileExt, MetadataExt}, fs::{self, File}, io, time::Instant};
use serde_json::{json, Value};
use tokio::{io::{AsyncBufReadExt, AsyncWriteExt, BufReader, unix::AsyncFd}, net::UnixStream};
type R<T> = Result<T>;
fn io_err(what: impl Into<String>) -> impl FnOnce(io::Error) -> EngineError { let what = what.into(); move |source| EngineError::Io { what, source } }
pub struct QemuConfig { store: PathBuf }
pub struct Qemu { store: PathBuf }
impl QemuConfig { pub fn new(p: &Path) -> Self { Self { store: p.into() } } }
impl Qemu { pub fn new(c: QemuConfig) -> Self { Self { store: c.store } } 
  fn empty(&self, mib: u32) -> R<PathBuf> { let p = self.store.join(format!("empty-{mib}.qcow2")); if !p.exists() { let t = self.store.join(format!(".empty-{mib}.{}", std::process::id())); Command::new("qemu-img").args(["create","-q","-f","qcow2","-o","cluster_size=64k"]).arg(&t).arg(format!("{mib}M")).status().map_err(io_err("qemu-img"))?; fs::rename(&t,&p).map_err(io_err("rename"))?; } Ok(p) }
}
#[derive(Clone, Serialize, Deserialize)]
struct Record { pid: u32, start: u64, shape: Shape, layers: Vec<(String, String)>, top: String, node: String, paused: bool, seat: bool, shared: bool }
struct Core { res: Resources, proc_: Process, child: Mutex<Option<Child>>, qmp: tokio::sync::Mutex<Qmp>, rec: Mutex<Record>, console: Arc<Mutex<Vec<u8>>>, stopped: Mutex<bool> , store: PathBuf }
struct Qmp { s: BufReader<UnixStream> }
impl Qmp {
  async fn open(p: &Path, process: &Process) -> R<Self> {
    let t = Instant::now();
    loop { match UnixStream::connect(p).await { Ok(s) => { let mut q = Qmp { s: BufReader::new(s) }; let mut l = String::new(); q.s.read_line(&mut l).await.map_err(io_err("qmp"))?; q.cmd("qmp_capabilities", json!({})).await?; return Ok(q) }, Err(e) => { if t.elapsed() > Duration::from_secs(20) { return Err(EngineError::Monitor(format!("no qmp {e}"))) } if Process::reopen(process.pid(), process.start()).is_none() { return Err(EngineError::Monitor("ended at start".into())) } tokio::time::sleep(Duration::from_millis(2)).await } } }
  }
  async fn reply(&mut self) -> R<Value> { loop { let mut l = String::new(); let n = self.s.read_line(&mut l).await.map_err(io_err("qmp"))?; if n == 0 { return Err(EngineError::Monitor("closed qmp".into())) } let v: Value = serde_json::from_str(&l).map_err(|e| EngineError::Monitor(e.to_string()))?; if v.get("event").is_some() { continue } if let Some(e) = v.get("error") { return Err(EngineError::Monitor(e.to_string())) } return Ok(v["return"].clone()) } }
  async fn cmd(&mut self, c: &str, a: Value) -> R<Value> { let m = json!({"execute": c, "arguments": a}).to_string() + "\n"; self.s.get_mut().write_all(m.as_bytes()).await.map_err(io_err("qmp"))?; self.reply().await.map_err(|e| EngineError::Monitor(format!("{c}: {e}"))) }
  async fn fd(&mut self, name: &str, f: &File) -> R<()> { use std::os::fd::AsFd; let m = json!({"execute":"getfd","arguments":{"fdname":name}}).to_string() + "\n"; self.s.get_ref().writable().await.map_err(io_err("qmp"))?; keiki_sys::socket::send_with_descriptor(self.s.get_ref(), m.as_bytes(), f.as_fd()).map_err(io_err("sendmsg"))?; self.reply().await.map(drop) }
}
fn layer_node(i: usize, layers: &[(String,String)]) -> String { format!("l{i}-{}", &layers[i].0[..layers[i].0.len().min(12)].replace('.', "")) }
fn blockdev(i: usize, layers: &[(String,String)]) -> Value { let (n, f) = &layers[i]; let mut v = json!({"driver": f, "node-name": layer_node(i, layers), "read-only": true, "file": {"driver":"file","filename": format!("layers/{n}"), "locking":"off", "read-only": true}}); if f == "qcow2" { v["backing"] = if i == 0 { Value::Null } else { json!(layer_node(i-1, layers)) }; } v }
fn top_dev(node: &str, file: &str, backing: Value) -> Value { json!({"driver":"qcow2","node-name": node, "file":{"driver":"file","filename": format!("layers/{file}"),"locking":"off"}, "backing": backing, "discard": "unmap"}) }
impl Qemu {
  async fn spawn(&self, res: Resources, shape: Shape, mut rec: Record, extra: Vec<String>, share: bool) -> R<Core> {
    let m = shape.memory_mib;
    let run = |f: &str| res.run_dir.join(f).display().to_string();
    let mut a: Vec<String> = ["-M","microvm,acpi=on,rtc=on,memory-backend=ram,auto-kernel-cmdline=off","-nodefaults","-no-user-config","-display","none","-no-reboot","-sandbox","on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny","-accel","tcg,tb-size=64","-cpu","max"].map(String::from).to_vec();
    a.extend(["-smp".into(), shape.vcpus.to_string(), "-m".into(), m.to_string(), "-object".into(), format!("memory-backend-file,id=ram,size={m}M,mem-path=base.mem,share={}", if share {"on"} else {"off"}), "-global".into(), "migration.send-configuration=off".into()]);
    a.extend(["-chardev".into(), format!("socket,id=con,path={},server=on,wait=off", run("con")), "-serial".into(), "chardev:con".into(), "-device".into(), "virtio-serial-device,max_ports=2".into(), "-chardev".into(), format!("socket,id=agent,path={},server=on,wait=off", run("agent")), "-device".into(), format!("virtserialport,chardev=agent,name={}", keiki_protocol::AGENT_PORT)]);
    a.extend(["-object".into(), "rng-random,filename=/dev/urandom,id=rng".into(), "-device".into(), "virtio-rng-device,rng=rng".into()]);
    a.extend(["-netdev".into(), if res.netns.is_some() { format!("tap,id=net,ifname={},script=no,downscript=no", keiki_protocol::net::TAP) } else { "hubport,id=net,hubid=0".into() }, "-device".into(), format!("virtio-net-device,netdev=net,mac={}", keiki_protocol::net::GUEST_MAC)]);
    a.extend(["-qmp".into(), format!("unix:{},server=on,wait=off", run("qmp"))]);
    a.extend(extra);
    a.extend(["-device".into(), format!("virtio-blk-device,drive={},id=disk", rec.node)]);
    let err = File::create(res.dir.join("stderr.log")).map_err(io_err("stderr"))?;
    let mut c = Command::new("qemu-system-x86_64"); use std::os::unix::process::CommandExt;
    c.args(&a).current_dir(&res.dir).stdin(Stdio::null()).stdout(Stdio::null()).stderr(err).process_group(0);
    let ns = res.netns.clone();
    let child = tokio::task::spawn_blocking(move || match ns { Some(p) => keiki_sys::netns::inside(&p, move || c.spawn()), None => c.spawn() }).await.map_err(|e| EngineError::Monitor(e.to_string()))?.map_err(io_err("cannot start qemu"))?;
    let proc_ = Process::open(child.id()).map_err(io_err("pidfd"))?;
    rec.pid = proc_.pid(); rec.start = proc_.start();
    write_rec(&res, &rec)?;
    let qmp = match Qmp::open(&res.run_dir.join("qmp"), &proc_).await { Ok(q) => q, Err(e) => { proc_.kill().ok(); let mut child = child; child.wait().ok(); return Err(EngineError::Monitor(format!("{e}: {}", fs::read_to_string(res.dir.join("stderr.log")).unwrap_or_default()))) } };
    let core = Core { console: pump(&res), res, proc_, child: Mutex::new(Some(child)), qmp: tokio::sync::Mutex::new(qmp), rec: Mutex::new(rec), stopped: Mutex::new(false), store: self.store.clone() };
    Ok(core)
  }
}
fn pump(res: &Resources) -> Arc<Mutex<Vec<u8>>> { let buf = Arc::new(Mutex::new(Vec::new())); let b = buf.clone(); let p = res.run_dir.join("con"); tokio::spawn(async move { use tokio::io::AsyncReadExt; if let Ok(mut s) = UnixStream::connect(p).await { let mut d = [0; 4096]; while let Ok(n) = s.read(&mut d).await { if n == 0 { break } let mut b = b.lock().unwrap(); b.extend_from_slice(&d[..n]); let l = b.len(); if l > 262144 { b.drain(..l - 131072); } } } }); buf }
fn write_rec(res: &Resources, rec: &Record) -> R<()> { let p = res.dir.join("machine.json.new"); fs::write(&p, serde_json::to_vec(rec).unwrap()).map_err(io_err("record"))?; fs::rename(&p, res.dir.join("machine.json")).map_err(io_err("record")) }
struct QM { c: Arc<Core> }
struct QS { c: Option<Core> }
impl Drop for QS { fn drop(&mut self) { if let Some(c) = &self.c { let _ = c.proc_.kill(); } } }
struct QF { image: Image, layers: Vec<(String,String)> }
impl Core {
  async fn wait(&self) { let fd = self.proc_.descriptor().unwrap(); let a = AsyncFd::with_interest(fd, tokio::io::Interest::READABLE).unwrap(); let _ = a.readable().await; if let Some(mut c) = self.child.lock().unwrap().take() { let _ = c.wait(); } }
  async fn end(&self) -> R<()> { self.proc_.kill().map_err(io_err("kill"))?; self.wait().await; Ok(()) }
  fn rec(&self) -> Record { self.rec.lock().unwrap().clone() }
  fn update(&self, f: impl FnOnce(&mut Record)) -> R<()> { let mut r = self.rec.lock().unwrap(); f(&mut r); write_rec(&self.res, &r) }
}
#[async_trait]
impl Engine for Qemu {
    fn kind(&self) -> EngineKind { EngineKind::Qemu }
    async fn probe(&self) -> Capabilities { Capabilities { kind: EngineKind::Qemu, usable: true, version: "10.0.2".into(), note: String::new() } }
    async fn boot(&self, spec: &BootSpec, res: Resources) -> Result<Box<dyn Machine>> {
        fs::create_dir_all(res.dir.join("layers")).map_err(io_err("layers"))?;
        fs::hard_link(&spec.disk, res.dir.join("layers/root.raw")).map_err(io_err("link disk"))?;
        let f = File::create(res.dir.join("base.mem")).map_err(io_err("mem"))?; f.set_len(u64::from(spec.shape.memory_mib) << 20).map_err(io_err("mem"))?;
        let id = keiki_types::SandboxId::new().to_string().replace('-', ""); let top = format!("{}.qcow2", &id[20..]);
        reflink::clone_file(&self.empty(spec.shape.disk_mib)?, &res.dir.join("layers").join(&top)).map_err(io_err("top"))?;
        let layers = vec![("root.raw".to_string(), "raw".to_string())]; let node = format!("t{}", &id[20..]);
        let extra = vec!["-blockdev".into(), blockdev(0, &layers).to_string(), "-blockdev".into(), top_dev(&node, &top, json!(layer_node(0, &layers))).to_string(), "-kernel".into(), spec.kernel.display().to_string(), "-initrd".into(), spec.initrd.display().to_string(), "-append".into(), format!("console=ttyS0 quiet panic=-1 reboot=t {}", spec.cmdline)];
        let rec = Record { pid: 0, start: 0, shape: spec.shape, layers, top, node, paused: false, seat: false, shared: true };
        let c = self.spawn(res, spec.shape, rec, extra, true).await?;
        Ok(Box::new(QM { c: Arc::new(c) }))
    }
    async fn image(&self, dir: &Path, shape: Shape) -> Result<Image> { let f = File::create(dir.join("vm.mem")).map_err(io_err("vm.mem"))?; f.set_len(u64::from(shape.memory_mib) << 20).map_err(io_err("vm.mem"))?; Ok(Image { dir: dir.into(), shape }) }
    async fn seat(&self, image: &Image, res: Resources) -> Result<Box<dyn Seat>> {
        fs::create_dir_all(res.dir.join("layers")).map_err(io_err("layers"))?;
        fs::hard_link(image.dir.join("vm.mem"), res.dir.join("base.mem")).map_err(io_err("link mem"))?;
        let id = keiki_types::SandboxId::new().to_string().replace('-', ""); let top = format!("{}.qcow2", &id[20..]); let node = format!("t{}", &id[20..]);
        reflink::clone_file(&self.empty(image.shape.disk_mib)?, &res.dir.join("layers").join(&top)).map_err(io_err("top"))?;
        let extra = vec!["-blockdev".into(), top_dev(&node, &top, Value::Null).to_string(), "-S".into(), "-incoming".into(), "defer".into()];
        let rec = Record { pid: 0, start: 0, shape: image.shape, layers: vec![], top, node, paused: false, seat: true, shared: false };
        let c = self.spawn(res, image.shape, rec, extra, false).await?;
        Ok(Box::new(QS { c: Some(c) }))
    }
    async fn load(&self, dir: &Path) -> Result<Arc<dyn Frozen>> { let m: keiki_snapshot::Manifest = serde_json::from_slice(&fs::read(dir.join("manifest.json")).map_err(io_err("manifest"))?).map_err(|e| EngineError::Refused { dir: dir.into(), why: e.to_string() })?; Ok(Arc::new(QF { image: Image { dir: dir.into(), shape: m.shape }, layers: m.layers })) }
    async fn adopt(&self, res: &Resources) -> Result<Option<Box<dyn Machine>>> {
        let Ok(b) = fs::read(res.dir.join("machine.json")) else { return Ok(None) };
        let rec: Record = serde_json::from_slice(&b).map_err(|e| EngineError::Monitor(e.to_string()))?;
        let Some(proc_) = Process::reopen(rec.pid, rec.start) else { return Ok(None) };
        if rec.seat { let _ = proc_.kill(); return Ok(None) }
        let qmp = Qmp::open(&res.run_dir.join("qmp"), &proc_).await?;
        let core = Core { console: pump(res), res: res.clone(), proc_, child: Mutex::new(None), qmp: tokio::sync::Mutex::new(qmp), rec: Mutex::new(rec), stopped: Mutex::new(false), store: self.store.clone() };
        Ok(Some(Box::new(QM { c: Arc::new(core) })))
    }
    async fn clear(&self, res: &Resources) -> Result<()> { let Ok(b) = fs::read(res.dir.join("machine.json")) else { return Ok(()) }; if let Ok(rec) = serde_json::from_slice::<Record>(&b) { if let Some(p) = Process::reopen(rec.pid, rec.start) { let _ = p.kill(); while Process::reopen(rec.pid, rec.start).is_some() { tokio::time::sleep(Duration::from_millis(5)).await; } } } Ok(()) }
}
#[async_trait]
impl Seat for QS {
    fn into_any(self: Box<Self>) -> Box<dyn std::any::Any + Send> { self }
    fn resources(&self) -> &Resources { &self.c.as_ref().unwrap().res }
    fn is_alive(&self) -> bool { let r = self.c.as_ref().unwrap(); Process::reopen(r.proc_.pid(), r.proc_.start()).is_some() }
    async fn cancel(mut self: Box<Self>) { if let Some(c) = self.c.take() { let _ = c.end().await; } }
}
#[async_trait]
impl Frozen for QF {
    fn image(&self) -> &Image { &self.image }
    async fn thaw(&self, seat: Box<dyn Seat>) -> Result<(Box<dyn Machine>, Steps)> {
        let mut seat = seat.into_any().downcast::<QS>().map_err(|_| EngineError::Monitor("other engine".into()))?;
        let core = seat.c.take().unwrap();
        match self.thaw_core(&core).await { Ok(steps) => Ok((Box::new(QM { c: Arc::new(core) }), steps)), Err(e) => { let _ = core.end().await; Err(EngineError::Monitor(format!("{e}: {}", fs::read_to_string(core.res.dir.join("stderr.log")).unwrap_or_default()))) } }
    }
    async fn persist(&self) -> Result<keiki_snapshot::Manifest> { let m = keiki_snapshot::Manifest { shape: self.image.shape, layers: self.layers.clone() }; let f = File::open(self.image.dir.join("vm.mem")).map_err(io_err("x"))?; f.sync_all().map_err(io_err("x"))?; fs::write(self.image.dir.join("manifest.json"), serde_json::to_vec(&m).unwrap()).map_err(io_err("manifest"))?; Ok(m) }
}

impl QF { async fn thaw_core(&self, core: &Core) -> R<Steps> {
    let mut t = Instant::now(); let mut steps = vec![];
    for (n, _) in &self.layers { fs::hard_link(self.image.dir.join("layers").join(n), core.res.dir.join("layers").join(n)).map_err(io_err("link layer"))?; }
    let mut q = core.qmp.lock().await;
    for i in 0..self.layers.len() { q.cmd("blockdev-add", blockdev(i, &self.layers)).await?; }
    let rec = core.rec();
    q.cmd("blockdev-reopen", json!({"options": [top_dev(&rec.node, &rec.top, json!(layer_node(self.layers.len()-1, &self.layers)))]})).await?;
    steps.push(("disk", t.elapsed())); t = Instant::now();
    let f = File::open(self.image.dir.join("vm.state")).map_err(io_err("vm.state"))?;
    q.fd("st", &f).await?;
    q.cmd("migrate-incoming", json!({"uri":"fd:st"})).await?;
    loop { let v = q.cmd("query-migrate", json!({})).await?; match v["status"].as_str() { Some("completed") => break, Some("failed") => return Err(EngineError::Monitor(format!("load failed {v}"))), _ => tokio::time::sleep(Duration::from_millis(1)).await } }
    steps.push(("load", t.elapsed())); t = Instant::now();
    core.update(|r| { r.layers = self.layers.clone(); r.seat = false; })?;
    q.cmd("cont", json!({})).await?;
    steps.push(("cont", t.elapsed()));
    Ok(Steps(steps))
} }
#[async_trait]
impl Machine for QM {
    fn resources(&self) -> &Resources { &self.c.res }
    fn shape(&self) -> Shape { self.c.rec().shape }
    async fn pause(&self) -> Result<()> { self.c.qmp.lock().await.cmd("stop", json!({})).await?; self.c.update(|r| r.paused = true) }
    async fn resume(&self) -> Result<()> { self.c.qmp.lock().await.cmd("cont", json!({})).await?; self.c.update(|r| r.paused = false) }
    async fn freeze(&self, image: Image) -> Result<(Arc<dyn Frozen>, FreezeReport)> {
        let c = &self.c; let rec = c.rec(); let mut q = c.qmp.lock().await;
        fs::create_dir_all(image.dir.join("layers")).map_err(io_err("layers"))?;
        let id = keiki_types::SandboxId::new().to_string().replace('-', ""); let top = format!("{}.qcow2", &id[20..]); let node = format!("t{}", &id[20..]);
        reflink::clone_file(&c.store.join(format!("empty-{}.qcow2", rec.shape.disk_mib)), &c.res.dir.join("layers").join(&top)).map_err(io_err("top"))?;
        q.cmd("blockdev-add", top_dev(&node, &top, Value::Null)).await?;
        let dst = fs::OpenOptions::new().read(true).write(true).open(image.dir.join("vm.mem")).map_err(io_err("vm.mem"))?;
        let base = File::open(c.res.dir.join("base.mem")).map_err(io_err("base"))?;
        if !rec.shared { reflink::clone_into(&base, &dst).map_err(io_err("clone"))?; }
        let mut t = Instant::now(); let mut steps = vec![];
        q.cmd("stop", json!({})).await?; let paused = Instant::now();
        steps.push(("stop", t.elapsed())); t = Instant::now();
        let r = async { q.cmd("xen-save-devices-state", json!({"filename": image.dir.join("vm.state").display().to_string(), "live": false})).await?;
        steps.push(("state", t.elapsed())); t = Instant::now();
        q.cmd("blockdev-snapshot", json!({"node": rec.node, "overlay": node})).await?;
        c.update(|r| { r.layers.push((rec.top.clone(), "qcow2".into())); r.top = top.clone(); r.node = node.clone(); })?;
        steps.push(("disk", t.elapsed())); t = Instant::now();
        let mut bytes = 0;
        if rec.shared { reflink::clone_into(&base, &dst).map_err(io_err("clone"))?; } else {
            let pid = c.proc_.pid(); let meta = base.metadata().map_err(io_err("meta"))?;
            bytes = tokio::task::spawn_blocking(move || -> io::Result<u64> {
                let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?; let pm = File::open(format!("/proc/{pid}/pagemap"))?; let mem = File::open(format!("/proc/{pid}/mem"))?;
                let mut total = 0; let mut buf = vec![0u8; 1 << 20];
                for (range, off) in pagemap::mappings_of(&maps, meta.dev(), meta.ino()) {
                    for r in pagemap::private_pages(&pm, range.clone())? { let mut at = r.start; while at < r.end { let n = (r.end - at).min(1 << 20) as usize; mem.read_exact_at(&mut buf[..n], at)?; dst.write_all_at(&buf[..n], at - range.start + off)?; at += n as u64; total += n as u64; } }
                } Ok(total) }).await.map_err(|e| EngineError::Monitor(e.to_string()))?.map_err(io_err("copy"))?; }
        steps.push(("memory", t.elapsed()));
        Ok(bytes) }.await;
        if !rec.paused { q.cmd("cont", json!({})).await?; }
        let vcpu_pause = paused.elapsed();
        let bytes = r?;
        let layers = c.rec().layers;
        for (n, _) in &layers { fs::hard_link(c.res.dir.join("layers").join(n), image.dir.join("layers").join(n)).map_err(io_err("link layer"))?; }
        Ok((Arc::new(QF { image, layers }), FreezeReport { vcpu_pause, private_bytes: bytes, steps: Steps(steps) }))
    }
    async fn stop(&self) -> Result<()> { self.c.end().await }
    async fn ended(&self) -> String { self.c.wait().await; format!("the monitor ended: {}", fs::read_to_string(self.c.res.dir.join("stderr.log")).unwrap_or_default()) }
    async fn memory(&self) -> Result<MemoryUse> { let s = fs::read_to_string(format!("/proc/{}/smaps_rollup", self.c.proc_.pid())).map_err(io_err("smaps"))?; let g = |k: &str| s.lines().filter(|l| l.starts_with(k)).filter_map(|l| l.split_whitespace().nth(1)?.parse::<u64>().ok()).sum::<u64>() * 1024; Ok(MemoryUse { guest_bytes: u64::from(self.c.rec().shape.memory_mib) << 20, rss_bytes: g("Rss:"), pss_bytes: g("Pss:"), private_bytes: g("Private_Dirty:") + g("Private_Clean:"), shared_bytes: g("Shared_Clean:") + g("Shared_Dirty:") }) }
    fn agent_socket(&self) -> PathBuf { self.c.res.run_dir.join("agent") }
    async fn console(&self, limit: usize) -> Vec<u8> { let b = self.c.console.lock().unwrap(); b[b.len().saturating_sub(limit)..].to_vec() }
}
