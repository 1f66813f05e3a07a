//! Requests to the thread that sends file descriptors: sends one packet to a real socket and checks the
//! answer.
//!
//! The first byte of the input is a bit mask. If bit 0 is set, the secret is inserted. If bit 1 is set,
//! each number below the number of pages is replaced by that page's identity. If bit 2 is set, a valid
//! header is added.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use rustix::io::retry_on_intr;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recvmsg, send, socket_with,
};
use stratalloc::allocator::Allocation;
use stratalloc::strategies::native::Engine;
use stratalloc_sim::{Sim, SimOptions};

use super::sharer::{self, PAGE_BYTES, PAGES_AT, SECRET, SOCKET};

const PAGES: usize = 3;
const MAGIC: &[u8; 8] = b"stratrq1";
const HEAD_BYTES: usize = 32;
/// The maximum number of pages in one request.
const ASKED_MAX: usize = 250;
const PATIENCE: Duration = Duration::from_secs(5);

/// An engine that shares one block, and the fields of the block's handle.
struct Sharer {
    _block: Allocation,
    _engine: Engine,
    secret: [u8; 16],
    socket: [u8; 16],
    identities: [[u8; 8]; PAGES],
}

static SHARER: LazyLock<Sharer> = LazyLock::new(|| {
    let engine = sharer::engine(Arc::new(Sim::new(SimOptions::default())));
    let (block, handle) = sharer::shared(&engine, 50 << 20);
    let bytes = handle.as_bytes();
    let identities = std::array::from_fn(|page| {
        let at = PAGES_AT + page * PAGE_BYTES;
        bytes[at..at + 8].try_into().expect("eight bytes")
    });
    Sharer {
        _block: block,
        _engine: engine,
        secret: bytes[SECRET].try_into().expect("sixteen bytes"),
        socket: bytes[SOCKET].try_into().expect("sixteen bytes"),
        identities,
    }
});

/// Checks one input.
pub(crate) fn check(bytes: &[u8]) {
    let Some((mode, rest)) = bytes.split_first() else { return };
    let packet = packet(*mode, rest);
    let (answer, descriptors) = converse(&packet);
    assert_eq!(answer.len(), 8, "an answer to {packet:x?}");
    let number = |at: usize| u32::from_le_bytes(answer[at..at + 4].try_into().expect("four bytes"));
    assert_eq!((number(0), number(4)), expected(&packet), "{packet:x?}");
    let promised = if number(0) == 0 { number(4) as usize } else { 0 };
    assert_eq!(descriptors.len(), promised);
}

fn packet(mode: u8, rest: &[u8]) -> Vec<u8> {
    let mut packet = rest.to_vec();
    if mode & 4 != 0 {
        let count = u32::try_from(rest.len() / 8).expect("inputs are short");
        let head = [MAGIC.as_slice(), &SHARER.secret, &count.to_le_bytes(), &[0; 4]].concat();
        packet = [head.as_slice(), &rest[..rest.len() / 8 * 8]].concat();
    }
    if mode & 1 != 0
        && let Some(secret) = packet.get_mut(8..24)
    {
        secret.copy_from_slice(&SHARER.secret);
    }
    if mode & 2 != 0 && packet.len() > HEAD_BYTES {
        for requested in packet[HEAD_BYTES..].chunks_exact_mut(8) {
            let number = usize::from(requested[0]);
            if number < PAGES && requested[1..] == [0; 7] {
                requested.copy_from_slice(&SHARER.identities[number]);
            }
        }
    }
    packet
}

/// Returns the two numbers of the right answer: 0 and the number of pages; 1 if refused; 2 and the page
/// that no longer exists; or 3 if malformed.
fn expected(packet: &[u8]) -> (u32, u32) {
    let Some((head, rest)) = packet.split_at_checked(HEAD_BYTES) else { return (3, 0) };
    let requested: Vec<&[u8]> = rest.chunks(8).collect();
    let is_request = head.starts_with(MAGIC)
        && rest.len().is_multiple_of(8)
        && head[24..28] == u32::try_from(requested.len()).expect("packets are short").to_le_bytes()
        && head[28..] == [0; 4]
        && (1..=ASKED_MAX).contains(&requested.len());
    if !is_request {
        return (3, 0);
    }
    if head[8..24] != SHARER.secret {
        return (1, 0);
    }
    let gone = |page: &&[u8]| !SHARER.identities.iter().any(|known| known == *page);
    match (0..).zip(&requested).find(|(_, page)| gone(page)) {
        Some((page, _)) => (2, page),
        None => (0, u32::try_from(requested.len()).expect("packets are short")),
    }
}

fn converse(packet: &[u8]) -> (Vec<u8>, Vec<OwnedFd>) {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let socket = socket_with(AddressFamily::UNIX, kind, flags, None).expect("a socket");
    for direction in [Timeout::Send, Timeout::Recv] {
        set_socket_timeout(&socket, direction, Some(PATIENCE)).expect("a time is set");
    }
    let name = [b"stratalloc/".as_slice(), &SHARER.socket].concat();
    let address = SocketAddrUnix::new_abstract_name(&name).expect("a name");
    // libFuzzer's timer sends signals, which interrupt system calls.
    retry_on_intr(|| connect(&socket, &address)).expect("the thread listens");
    let sent = retry_on_intr(|| send(&socket, packet, SendFlags::NOSIGNAL));
    sent.expect("the thread takes a packet");
    let mut answer = [0; 64];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(ASKED_MAX))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let got = retry_on_intr(|| {
        let mut parts = [IoSliceMut::new(&mut answer)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        recvmsg(&socket, &mut parts, &mut beside, flags).map(|got| got.bytes)
    });
    let got = got.expect("the thread answers within its time");
    let descriptors = beside.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let descriptors = descriptors.flatten().collect();
    (answer[..got].to_vec(), descriptors)
}
