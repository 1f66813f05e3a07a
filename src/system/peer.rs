//! The process at the other end of a local socket.
#![expect(unsafe_code, reason = "reading a socket's option")]

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd};

/// The process that connected a socket, or that listened on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The process id. `None` for a process that this pid namespace does not contain, such as one of another
    /// container.
    pub process: Option<u32>,
    /// The effective user id.
    pub user: u32,
}

/// Returns the process at the other end of a connected local socket. Does not wait.
///
/// # Errors
///
/// Any error of the system, such as for a socket that is not connected.
pub fn peer_of(socket: impl AsFd) -> io::Result<Peer> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    #[expect(clippy::cast_possible_truncation, reason = "a structure of 12 bytes")]
    let mut size = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the system writes at most `size` bytes, which is the size of `found`, and any bytes are a valid
    // `ucred`. The descriptor is borrowed, so it stays open.
    let done = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut size,
        )
    };
    // A socket that is not connected has no peer, and the system leaves -1 for its user.
    match done {
        0 if found.uid != u32::MAX => {
            let process = u32::try_from(found.pid).ok().filter(|process| *process != 0);
            Ok(Peer { process, user: found.uid })
        }
        0 => Err(io::ErrorKind::NotConnected.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_peer_of_a_pair_is_this_process() {
        let (one, _other) = UnixStream::pair().unwrap();
        let user = rustix::process::geteuid().as_raw();
        let expected = Peer { process: Some(std::process::id()), user };
        assert_eq!(peer_of(&one).unwrap(), expected);
        assert!(peer_of(std::fs::File::open("/dev/null").unwrap()).is_err());
    }
}
