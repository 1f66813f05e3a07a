//! The exporting process: the descriptors of its pages, and a thread that sends them.
//!
//! The first share of pages starts the thread. The thread listens on a socket in the abstract namespace.
//! The socket's name is random and is part of the handle. A connection carries one request and one
//! answer, each in one packet. Connections of other users are closed at once. A connection without a
//! request is closed after a time limit. The number of open connections is limited, and further ones wait
//! in the system's short queue. So no client can block the thread or increase its memory without bound.
//! The thread ends with the [`Exporter`].

use std::io::{self, IoSlice, PipeWriter};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use parking_lot::Mutex;
use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, accept_with, bind, listen, recv, sendmsg, socket_with,
};
use rustix::process::geteuid;
use rustix::rand::{GetRandomFlags, getrandom};

use super::packet::{Answer, CHUNK_PAGES, PageRequest, REQUEST_BYTES_MAX};
use super::{PageEntry, ProcessMark, Random, SharingError};
use crate::system::peer_of;

/// The most open connections. Further ones wait in the system's queue.
const CONNECTIONS_MAX: usize = 16;
/// The time that a connection has to send its request.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long the thread stops accepting connections after the system had no resources for one.
const PAUSE: Duration = Duration::from_millis(50);

/// The descriptors of shared pages, by the random identity of each page.
type Table = Arc<Mutex<HashMap<u64, Arc<OwnedFd>>>>;

/// The pages that this process shares. Dropping the exporter ends the thread. No page can be opened
/// after that.
#[derive(Debug)]
pub(crate) struct Exporter {
    pub(crate) owner: ProcessMark,
    pub(crate) secret: Random,
    pub(crate) socket: Random,
    table: Table,
    /// Closing this end of the pipe ends the thread.
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl Exporter {
    /// Starts the thread. Does not wait.
    pub(crate) fn start() -> Result<Self, SharingError> {
        let (secret, socket) = (random()?, random()?);
        let listener = socket_of_packets(SocketFlags::NONBLOCK)?;
        let refuse = |error: Errno| SharingError::system("listen on a socket", error);
        bind(&listener, &socket_name(&socket)?).map_err(refuse)?;
        let queue = i32::try_from(CONNECTIONS_MAX).expect("a small number");
        listen(&listener, queue).map_err(refuse)?;
        let (stopped, stop) =
            io::pipe().map_err(|error| SharingError::system("make a pipe", error))?;
        let table = Table::default();
        let mut server =
            Server { listener, stopped: stopped.into(), secret, table: Arc::clone(&table) };
        let thread = std::thread::Builder::new()
            .name("stratalloc-share".to_owned())
            .spawn(move || server.serve())
            .map_err(|error| SharingError::system("start a thread", error))?;
        let owner = ProcessMark::own();
        Ok(Self { owner, secret, socket, table, stop: Some(stop), thread: Some(thread) })
    }

    /// Adds the descriptor of a page. Other processes can fetch it until [`withdraw`](Self::withdraw).
    pub(crate) fn offer(&self, descriptor: OwnedFd) -> Result<PageEntry, SharingError> {
        let (device, inode) = file_of(&descriptor)?;
        let mut table = self.table.lock();
        loop {
            let bits = random()?;
            let half = bits.first_chunk().expect("16 bytes have 8");
            let identity = u64::from_le_bytes(*half);
            if !table.contains_key(&identity) {
                table.insert(identity, Arc::new(descriptor));
                return Ok(PageEntry { identity, device, inode });
            }
        }
    }

    /// Removes the descriptor of a page. Must be called before the page is unmapped.
    pub(crate) fn withdraw(&self, page: &PageEntry) {
        self.table.lock().remove(&page.identity);
    }

    /// Returns whether this exporter is a copy in a forked process. The thread does not exist there.
    pub(crate) fn is_forked(&self) -> bool {
        self.owner.process != std::process::id()
    }

    /// Removes all descriptors.
    pub(crate) fn withdraw_all(&self) {
        self.table.lock().clear();
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        drop(self.stop.take());
        // A forked process does not have the thread and would wait forever, so it does not wait.
        if let Some(thread) = self.thread.take().filter(|_| !self.is_forked()) {
            // The wait is short: the thread answers at most the requests that its last `poll` reported. A
            // panic of the thread is ignored.
            let _ = thread.join();
        }
    }
}

/// Returns random bits from the system.
fn random() -> Result<Random, SharingError> {
    let mut bits = [0; 16];
    let refuse = |error: Errno| SharingError::system("get random bits", error);
    let count = getrandom(&mut bits, GetRandomFlags::empty()).map_err(refuse)?;
    assert_eq!(count, bits.len(), "the system gives up to 256 bytes whole");
    Ok(bits)
}

/// Returns device and inode of a descriptor's file.
pub(super) fn file_of(descriptor: impl AsFd) -> Result<(u64, u64), SharingError> {
    let refuse = |error: Errno| SharingError::system("stat a descriptor", error);
    let stat = fstat(descriptor).map_err(refuse)?;
    Ok((stat.st_dev, stat.st_ino))
}

pub(super) fn socket_of_packets(flags: SocketFlags) -> Result<OwnedFd, SharingError> {
    let flags = flags | SocketFlags::CLOEXEC;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|error| SharingError::system("make a socket", error))
}

pub(super) fn socket_name(socket: &Random) -> Result<SocketAddrUnix, SharingError> {
    let name: Vec<u8> = b"stratalloc/".iter().chain(socket).copied().collect();
    SocketAddrUnix::new_abstract_name(&name)
        .map_err(|error| SharingError::system("name a socket", error))
}

struct Server {
    listener: OwnedFd,
    stopped: OwnedFd,
    secret: Random,
    table: Table,
}

struct Connection {
    socket: OwnedFd,
    until: Instant,
}

impl Server {
    fn serve(&mut self) {
        let mut connections: Vec<Connection> = Vec::with_capacity(CONNECTIONS_MAX);
        let mut paused_until = None;
        loop {
            let now = Instant::now();
            connections.retain(|connection| connection.until > now);
            if paused_until.is_some_and(|until| until <= now) {
                paused_until = None;
            }
            let listens = connections.len() < CONNECTIONS_MAX && paused_until.is_none();
            let until = connections.iter().map(|connection| connection.until).chain(paused_until);
            let wait = until.min().map(|until| until.saturating_duration_since(now));
            let Some((ready, has_new_connection)) = self.wait(&connections, listens, wait) else {
                return;
            };
            // In descending order: `swap_remove` moves the last connection to `at`, and that one was
            // visited before.
            for at in (0..connections.len()).rev().filter(|at| ready[*at]) {
                let connection = connections.swap_remove(at);
                // A failed send affects only the client, which has ended or does not read.
                let _ = self.answer(&connection.socket);
            }
            if has_new_connection && !self.accept(&mut connections) {
                paused_until = Some(Instant::now() + PAUSE);
            }
        }
    }

    /// Waits for a request, a new connection or the end of the exporter, at most for the time `wait`.
    /// Returns which connections have a request, and whether there is a new connection. Returns `None` if
    /// the thread must end.
    fn wait(
        &self,
        connections: &[Connection],
        listens: bool,
        wait: Option<Duration>,
    ) -> Option<(Vec<bool>, bool)> {
        let listener = listens.then_some(&self.listener);
        let sockets = connections.iter().map(|connection| &connection.socket);
        let all = [&self.stopped].into_iter().chain(sockets).chain(listener);
        let mut polled: Vec<_> = all.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let wait = wait.map(|wait| Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: wait.subsec_nanos().into(),
        });
        match poll(&mut polled, wait.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR | Errno::AGAIN) => polled.iter_mut().for_each(PollFd::clear_revents),
            // The system lacks memory even for waiting. The thread ends, so sharing ends, but the
            // program continues.
            Err(_) => return None,
        }
        let ready: Vec<bool> = polled.iter().map(|fd| !fd.revents().is_empty()).collect();
        let (first, rest) = ready.split_first()?;
        let (connections, listener) = rest.split_at(connections.len());
        let listener = listener.first().copied().unwrap_or(false);
        (!first).then(|| (connections.to_vec(), listener))
    }

    /// Accepts one connection, or closes it if it is of another user. Returns false if the system had no
    /// resources for it.
    fn accept(&self, connections: &mut Vec<Connection>) -> bool {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        match accept_with(&self.listener, flags) {
            Ok(socket) => {
                if peer_of(&socket).is_ok_and(|peer| peer.user == geteuid().as_raw()) {
                    connections.push(Connection { socket, until: Instant::now() + PATIENCE });
                }
                true
            }
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => true,
            Err(_) => false,
        }
    }

    /// Reads the request that has arrived and answers it. Does not wait.
    fn answer(&self, socket: &OwnedFd) -> io::Result<()> {
        // One byte more than the maximum, to detect a longer request.
        let mut bytes = [0; REQUEST_BYTES_MAX + 1];
        let (_, len) = recv(socket, &mut bytes[..], RecvFlags::DONTWAIT)?;
        let (answer, descriptors) = self.look_up(&bytes[..len.min(bytes.len())]);
        let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(|fd| fd.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(CHUNK_PAGES))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        if !borrowed.is_empty() {
            let fits = beside.push(SendAncillaryMessage::ScmRights(&borrowed));
            assert!(fits, "there is room for every legal request");
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        sendmsg(socket, &[IoSlice::new(&answer.to_bytes())], &mut beside, flags)?;
        Ok(())
    }

    fn look_up(&self, bytes: &[u8]) -> (Answer, Vec<Arc<OwnedFd>>) {
        let Some(request) = PageRequest::from_bytes(bytes) else {
            return (Answer::Malformed, Vec::new());
        };
        // Compares all bytes of the secret, so that the time does not show how many match.
        let pairs = request.secret.iter().zip(&self.secret);
        if pairs.fold(0, |differ, (theirs, ours)| differ | (theirs ^ ours)) != 0 {
            return (Answer::Refused, Vec::new());
        }
        let table = self.table.lock();
        let mut found = Vec::with_capacity(request.identities.len());
        for (page, identity) in (0..).zip(&request.identities) {
            match table.get(identity) {
                Some(descriptor) => found.push(Arc::clone(descriptor)),
                None => return (Answer::Released(page), Vec::new()),
            }
        }
        let count = u32::try_from(found.len()).expect("a request names few pages");
        (Answer::Pages(count), found)
    }
}
