//! Loaded into QEMU before anything else: gives the guest's RAM its memory image, and takes free pages away.
//!
//! QEMU is told that RAM is anonymous memory. Where it maps that, this maps the image instead, privately and from a
//! descriptor that cannot write. QEMU knows of no file, so when a guest reports free pages QEMU does what it does
//! with anonymous memory, `MADV_DONTNEED`, instead of punching a hole into a file that others use. On a private file
//! mapping that call would show the image again, so fresh zero memory is mapped there. RFD 007 tells the rest.
//!
//! Two calls of the C library are replaced, both straight system calls. Nothing is allocated, nothing is locked: all
//! state is the address of RAM, written once while QEMU has one thread that maps.
#![no_std]

use core::{
    ffi::{c_char, c_int, c_long, c_void},
    sync::atomic::{AtomicUsize, Ordering},
};

#[link(name = "c")]
unsafe extern "C" {
    fn syscall(number: c_long, ...) -> c_long;
    fn getenv(name: *const c_char) -> *const c_char;
    fn strtoull(text: *const c_char, end: *mut *mut c_char, base: c_int) -> u64;
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

const SYS_MMAP: c_long = 9;
const SYS_MADVISE: c_long = 28;
const SYS_OPENAT: c_long = 257;
const SYS_CLOSE: c_long = 3;
const AT_FDCWD: c_long = -100;
const O_CLOEXEC: c_long = 0o2_000_000;
const PROT_READ: c_int = 1;
const PROT_WRITE: c_int = 2;
const MAP_PRIVATE: c_int = 2;
const MAP_FIXED: c_int = 0x10;
const MAP_ANONYMOUS: c_int = 0x20;
const MAP_NORESERVE: c_int = 0x4000;
const MADV_DONTNEED: c_int = 4;
const MAP_FAILED: *mut c_void = usize::MAX as *mut c_void;

/// Smaller pieces stay: each is a mapping of its own, and a process has only so many. Linux reports 2 MiB and more.
const LEAST: usize = 1 << 20;
/// The beginning stays the image's, so that RAM can be told from outside by its file.
const KEPT: usize = 2 << 20;

/// Address of RAM; 0 until it is mapped.
static RAM: AtomicUsize = AtomicUsize::new(0);

/// Path of the image, and its size; 0 where we were not asked for anything.
fn wanted() -> (*const c_char, usize) {
    // SAFETY: both names are C strings; what the C library returns is one, or null, which is not read.
    unsafe {
        let (path, bytes) = (getenv(c"KEIKI_RAM".as_ptr()), getenv(c"KEIKI_RAM_BYTES".as_ptr()));
        if path.is_null() || bytes.is_null() {
            return (path, 0);
        }
        (path, strtoull(bytes, core::ptr::null_mut(), 10) as usize)
    }
}

/// The C library's, but for guest RAM.
///
/// # Safety
/// That of `mmap`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    address: *mut c_void,
    length: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: c_long,
) -> *mut c_void {
    // SAFETY: the caller's own arguments.
    let plain = |flags: c_int, fd: c_long| unsafe {
        syscall(SYS_MMAP, address, length, c_long::from(protection), c_long::from(flags), fd, offset)
            as *mut c_void
    };
    let is_fixed = flags & (MAP_FIXED | MAP_ANONYMOUS) == MAP_FIXED | MAP_ANONYMOUS;
    if !is_fixed || protection & PROT_WRITE == 0 || RAM.load(Ordering::Relaxed) != 0 {
        return plain(flags, c_long::from(fd));
    }
    let (path, bytes) = wanted();
    if length != bytes {
        return plain(flags, c_long::from(fd));
    }
    // SAFETY: `path` is a C string of the environment; read-only, which is 0.
    let image = unsafe { syscall(SYS_OPENAT, AT_FDCWD, path, O_CLOEXEC) };
    if image < 0 {
        return MAP_FAILED;
    }
    let mapped = plain(flags & !MAP_ANONYMOUS, image);
    // SAFETY: a descriptor of ours.
    unsafe { syscall(SYS_CLOSE, image) };
    if mapped != MAP_FAILED {
        RAM.store(mapped as usize, Ordering::Relaxed);
    }
    mapped
}

/// The C library's, but what is not needed of guest RAM becomes zero memory.
///
/// # Safety
/// That of `madvise`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int {
    let ram = RAM.load(Ordering::Relaxed);
    let start = address as usize;
    if advice != MADV_DONTNEED || ram == 0 || start < ram || start >= ram + wanted().1 {
        // SAFETY: the caller's own arguments.
        return unsafe { syscall(SYS_MADVISE, address, length, c_long::from(advice)) as c_int };
    }
    // Advice need not be taken.
    if length < LEAST || start < ram + KEPT || length > ram + wanted().1 - start {
        return 0;
    }
    let (protection, flags) =
        (PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS | MAP_NORESERVE);
    // SAFETY: all of it is RAM, which QEMU gave up; nothing else is there.
    let mapped = unsafe {
        syscall(
            SYS_MMAP,
            address,
            length,
            c_long::from(protection),
            c_long::from(flags),
            -1 as c_long,
            0 as c_long,
        )
    };
    if mapped == -1 { -1 } else { 0 }
}
