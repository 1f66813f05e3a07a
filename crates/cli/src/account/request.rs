//! The request for the account of another process, over its socket.
//!
//! The socket's name has the pid namespace and the process id there, because processes of several containers
//! may have equal ids and one network namespace. Every step has a time limit: the other process may be
//! stopped, and any process can have taken the name.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use stratalloc::system::peer_of;

/// Limits the text that another process sends.
const TEXT_BYTES_MAX: usize = 1 << 20;
/// The other process accepts connections at once.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// The other process waits for the command line while it makes its account.
const WAIT: Duration = Duration::from_secs(90);

/// Returns the text that a process sends. Waits for it, at most 95 seconds.
pub(super) fn text_of(process: u32) -> io::Result<Vec<u8>> {
    let is_missing = |name: &str| !fs::exists(format!("/proc/{name}")).unwrap_or(true);
    if is_missing(&process.to_string()) && !is_missing("self") {
        return Err(io::Error::other("there is no such process"));
    }
    let mut stream = connected(&name_of(process))?;
    // Any process can have taken the name.
    if peer_of(&stream)?.process != Some(process) {
        return Err(io::Error::other("another process has its socket"));
    }
    let end = Instant::now() + WAIT;
    let (mut text, mut part) = (Vec::new(), vec![0; 1 << 16]);
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || text.len() > TEXT_BYTES_MAX {
            return Err(io::Error::other("it sends too much, or too slowly"));
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut part) {
            Ok(0) => return Ok(text),
            Ok(bytes) => text.extend_from_slice(&part[..bytes]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

/// Connects to a socket in the abstract namespace.
fn connected(name: &str) -> io::Result<UnixStream> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // A connect waits while the other queue is full.
    set_socket_timeout(&socket, Timeout::Send, Some(CONNECT_MAX))?;
    let (address, end) =
        (SocketAddrUnix::new_abstract_name(name.as_bytes())?, Instant::now() + CONNECT_MAX);
    loop {
        match connect(&socket, &address) {
            Ok(()) => return Ok(socket.into()),
            Err(Errno::INTR) if Instant::now() < end => {}
            Err(Errno::INTR | Errno::AGAIN) => {
                let seconds = CONNECT_MAX.as_secs();
                return Err(io::Error::other(format!(
                    "it accepts no connection within {seconds} seconds"
                )));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns the name of a process's socket. Where the system does not show the other process's namespace, it
/// is taken for this program's.
fn name_of(process: u32) -> String {
    let namespace =
        |process: &str| Some(fs::metadata(format!("/proc/{process}/ns/pid")).ok()?.ino());
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    // The last number is the one in the innermost namespace.
    let inside = status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:")?.split_whitespace().last()?.parse().ok())
        .unwrap_or(process);
    let namespace = namespace(&process.to_string()).or_else(|| namespace("self")).unwrap_or(0);
    format!("stratalloc-account-{namespace}-{inside}")
}
