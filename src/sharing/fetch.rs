//! The opening process: requests the descriptors of a handle's pages, a limited number at a time.
//!
//! Requests carry the handle's secret. They go to the exporter's socket, which is reachable only in the
//! exporter's network namespace. The file of each received descriptor is compared with the file that the
//! handle names. Each step (connect, send, receive) waits for the exporter a few seconds at most.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, SocketFlags,
    connect, recvmsg, send,
};
use rustix::process::geteuid;

use super::exporter::{file_of, socket_name, socket_of_packets};
use super::packet::{ANSWER_BYTES, Answer, CHUNK_PAGES, PageRequest};
use super::{PageEntry, PagesShare, SharingError};
use crate::system::peer_of;

/// The time limit of each step.
const PATIENCE: Duration = Duration::from_secs(5);

/// Fetches the descriptors of a handle's pages, in the handle's order.
#[derive(Debug)]
pub(crate) struct Fetch<'h> {
    share: &'h PagesShare,
    next: usize,
}

impl<'h> Fetch<'h> {
    pub(crate) fn new(share: &'h PagesShare) -> Self {
        Self { share, next: 0 }
    }

    /// Returns the descriptors of the next pages, at most `CHUNK_PAGES`, or `None` after the last page.
    pub(crate) fn next_pages(&mut self) -> Result<Option<Vec<OwnedFd>>, SharingError> {
        let rest = &self.share.pages[self.next..];
        let wanted = &rest[..rest.len().min(CHUNK_PAGES)];
        if wanted.is_empty() {
            return Ok(None);
        }
        let descriptors = self.request(wanted)?;
        for (page, (descriptor, entry)) in (self.next..).zip(descriptors.iter().zip(wanted)) {
            if file_of(descriptor)? != (entry.device, entry.inode) {
                return Err(SharingError::WrongDescriptor { page });
            }
        }
        self.next += wanted.len();
        Ok(Some(descriptors))
    }

    fn exporter(&self) -> u32 {
        self.share.owner.process
    }

    /// Requests the descriptors of these pages over the socket.
    fn request(&self, pages: &[PageEntry]) -> Result<Vec<OwnedFd>, SharingError> {
        let socket = socket_of_packets(SocketFlags::empty())?;
        for direction in [Timeout::Send, Timeout::Recv] {
            sockopt::set_socket_timeout(&socket, direction, Some(PATIENCE))
                .map_err(|error| SharingError::system("set a socket's timeout", error))?;
        }
        let name = socket_name(&self.share.socket)?;
        match patiently(patience(), || connect(&socket, &name)) {
            Ok(()) => {}
            Err(Errno::CONNREFUSED | Errno::NOENT | Errno::ACCESS | Errno::PERM) => {
                let process = self.exporter();
                return Err(match self.share.owner.may_live() {
                    true => SharingError::Unreachable { process },
                    false => SharingError::ExporterGone { process },
                });
            }
            Err(error) => return Err(self.lost("connect to the exporter", error)),
        }
        // Check the user before sending the secret: a process of another user may have bound this name
        // to collect secrets.
        let peer = peer_of(&socket)
            .map_err(|error| SharingError::system("read the peer's credentials", error))?;
        if peer.user != geteuid().as_raw() {
            let (user, process) = (peer.user, self.exporter());
            return Err(SharingError::ForeignUser { user, process });
        }
        let identities = pages.iter().map(|page| page.identity).collect();
        let request = PageRequest { secret: self.share.secret, identities };
        let request = request.to_bytes();
        patiently(patience(), || send(&socket, &request, SendFlags::NOSIGNAL))
            .map_err(|error| self.lost("send the request to the exporter", error))?;
        self.receive(&socket, pages.len())
    }

    /// Receives the answer and its descriptors.
    fn receive(&self, socket: &OwnedFd, wanted: usize) -> Result<Vec<OwnedFd>, SharingError> {
        let process = self.exporter();
        let bad = |why| SharingError::BadAnswer { process, why };
        let mut bytes = [0; ANSWER_BYTES + 1];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(CHUNK_PAGES))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let receive = || {
            let mut parts = [IoSliceMut::new(&mut bytes)];
            recvmsg(socket, &mut parts, &mut beside, RecvFlags::CMSG_CLOEXEC)
                .map(|got| (got.bytes, got.flags))
        };
        let (count, flags) = patiently(patience(), receive)
            .map_err(|error| self.lost("receive the exporter's answer", error))?;
        // Collect the descriptors first, so that an early return closes them.
        let descriptors: Vec<OwnedFd> = beside
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
                _ => None,
            })
            .flatten()
            .collect();
        if count == 0 {
            return Err(self.lost("receive the exporter's answer", Errno::CONNRESET));
        }
        match Answer::from_bytes(&bytes[..count.min(bytes.len())]) {
            Some(Answer::Pages(count)) => {
                if flags.contains(ReturnFlags::CTRUNC) {
                    let message = "this process has reached its limit of open files".to_owned();
                    return Err(SharingError::System { step: "receive descriptors", message });
                }
                if descriptors.len() != wanted || usize::try_from(count) != Ok(wanted) {
                    return Err(bad("wrong number of descriptors"));
                }
                Ok(descriptors)
            }
            Some(Answer::Refused) => Err(SharingError::Refused { process }),
            Some(Answer::Released(page)) => {
                let page = usize::try_from(page).ok().filter(|page| *page < wanted);
                let page = page.ok_or(bad("it names a page that was not requested"))?;
                Err(SharingError::PageGone { page: self.next + page })
            }
            Some(Answer::Malformed) => Err(bad("it rejected the request as malformed")),
            None => Err(bad("unknown format")),
        }
    }

    /// Returns the error for a step that failed with `error`.
    fn lost(&self, step: &'static str, error: Errno) -> SharingError {
        let process = self.exporter();
        match error {
            Errno::AGAIN => SharingError::TimedOut { process, seconds: PATIENCE.as_secs() },
            Errno::CONNRESET | Errno::PIPE | Errno::CONNREFUSED if !self.share.owner.may_live() => {
                SharingError::ExporterGone { process }
            }
            Errno::CONNRESET | Errno::PIPE => {
                SharingError::BadAnswer { process, why: "it closed the connection" }
            }
            error => SharingError::system(step, error),
        }
    }
}

/// Returns the time at which a step that begins now must have ended.
fn patience() -> Instant {
    Instant::now() + PATIENCE
}

/// Repeats a call while signals interrupt it. The system does not restart socket calls with a timeout,
/// even if the signal handler has `SA_RESTART`. After `until`, an interrupted call fails as timed out.
/// Otherwise frequent signals could make it wait forever.
fn patiently<T>(until: Instant, mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) if Instant::now() < until => {}
            Err(Errno::INTR) => return Err(Errno::AGAIN),
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_ends_no_step_and_signals_without_end_do() {
        let mut left = 3;
        let mut interrupted = || {
            left -= 1;
            if left > 0 { Err(Errno::INTR) } else { Ok(7) }
        };
        assert_eq!(patiently(patience(), &mut interrupted), Ok(7));
        let soon = Instant::now() + Duration::from_millis(1);
        assert_eq!(patiently(soon, || Err::<(), _>(Errno::INTR)), Err(Errno::AGAIN));
        assert_eq!(patiently(soon, || Err::<(), _>(Errno::PIPE)), Err(Errno::PIPE));
    }
}
