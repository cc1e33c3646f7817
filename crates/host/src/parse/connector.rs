//! The process connector's datagrams: a `nlmsghdr` (include/uapi/linux/netlink.h), a `cn_msg` (connector.h) and a
//! `proc_event` (cn_proc.h), in the byte order of the machine. The events themselves have been the same since 2.6.

use super::text::malformed;
use pagefold_base::{Pid, Reading};

/// `CN_IDX_PROC` and `CN_VAL_PROC`.
const PROC_CONNECTOR_ID: (u32, u32) = (1, 1);

/// `PROC_EVENT_NONE`, which answers a request.
const PROC_EVENT_NONE: u32 = 0;

/// `PROC_EVENT_EXEC`.
pub const PROC_EVENT_EXEC: u32 = 2;

/// Bytes of `nlmsghdr`, of `cn_msg`, and of the common part of all `proc_event`s.
const HEADER_BYTES: [usize; 3] = [16, 20, 16];

/// The event in a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcEvent {
    /// The kernel has answered the request with this number; `error` is 0 for success.
    Ack {
        /// `ack` of the request, one less than in the answer; the kernel uses other numbers for `seq`.
        request: u32,
        /// An errno.
        error: u32,
    },
    /// A process has executed another program: `process_tgid`, in the initial PID namespace.
    Exec(Pid),
    /// Another event.
    Other,
}

/// Parses a datagram of the process connector.
pub fn proc_event(datagram: &[u8]) -> Reading<ProcEvent> {
    let word = |at: usize| {
        let bytes = datagram.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
        bytes.map(u32::from_ne_bytes).ok_or_else(|| malformed("not a process event", datagram))
    };
    let [message, event, data] = [HEADER_BYTES[0], HEADER_BYTES[0] + HEADER_BYTES[1], HEADER_BYTES.iter().sum()];
    if (word(message)?, word(message + 4)?) != PROC_CONNECTOR_ID || word(0)? as usize > datagram.len() {
        return Err(malformed("not a process event", datagram));
    }
    Ok(match word(event)? {
        PROC_EVENT_NONE => ProcEvent::Ack { request: word(message + 12)?.wrapping_sub(1), error: word(data)? },
        PROC_EVENT_EXEC => ProcEvent::Exec(Pid(word(data + 4)?)),
        _ => ProcEvent::Other,
    })
}

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcRequest {
    /// `PROC_CN_MCAST_LISTEN`: all events, with an answer.
    Listen,
    /// The same for events of these kinds only, without an answer. Kernels before 6.6 ignore it.
    ListenFor(u32),
    /// `PROC_CN_MCAST_IGNORE`.
    Ignore,
}

/// Encodes a request to the process connector with its number.
pub fn encode_proc_request(request: ProcRequest, request_number: u32) -> Vec<u8> {
    let body = match request {
        ProcRequest::Listen => vec![1],
        ProcRequest::ListenFor(events) => vec![1, events],
        ProcRequest::Ignore => vec![2],
    };
    let length = body.len() * 4;
    let message_bytes = HEADER_BYTES[0] + HEADER_BYTES[1] + length;
    // NLMSG_DONE is 3, in the half of the word before the flags.
    let kind = u32::from_ne_bytes(match 3u16.to_ne_bytes() {
        [one, other] => [one, other, 0, 0],
    });
    let size = (length as u16).to_ne_bytes();
    let header = [message_bytes as u32, kind, 0, 0, PROC_CONNECTOR_ID.0, PROC_CONNECTOR_ID.1, 0, request_number];
    let mut bytes: Vec<u8> = header.iter().flat_map(|word| word.to_ne_bytes()).collect();
    bytes.extend([size[0], size[1], 0, 0]);
    bytes.extend(body.iter().flat_map(|word| word.to_ne_bytes()));
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::Absent;
    use proptest::prelude::*;

    /// A datagram of 6.18 on x86-64, in words: process 11865 has executed another program.
    fn exec_datagram() -> Vec<u8> {
        let words: [u32; 19] = [76, 3, 0, 0, 1, 1, 66, 0, 40, 2, 1, 0x5047_4e81, 0x69, 11865, 11865, 0, 0, 0, 0];
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn event_kinds_are_parsed() {
        assert_eq!(proc_event(&exec_datagram()), Ok(ProcEvent::Exec(Pid(11865))));
        let mut other = exec_datagram();
        other[36..40].copy_from_slice(&1u32.to_ne_bytes());
        assert_eq!(proc_event(&other), Ok(ProcEvent::Other));
        other[36..40].copy_from_slice(&0u32.to_ne_bytes());
        other[52..56].copy_from_slice(&1u32.to_ne_bytes());
        other[28..32].copy_from_slice(&67u32.to_ne_bytes());
        assert_eq!(proc_event(&other), Ok(ProcEvent::Ack { request: 66, error: 1 }));
    }

    #[test]
    fn truncated_or_foreign_datagrams_are_malformed() {
        for length in 0..60 {
            assert!(matches!(proc_event(&exec_datagram()[..length]), Err(Absent::Malformed(_))), "{length}");
        }
        for at in [16, 20] {
            let mut foreign = exec_datagram();
            foreign[at] ^= 8;
            assert!(proc_event(&foreign).is_err());
        }
    }

    #[test]
    fn request_length_matches_its_header() {
        for (request, length) in
            [(ProcRequest::Listen, 40), (ProcRequest::ListenFor(PROC_EVENT_EXEC), 44), (ProcRequest::Ignore, 40)]
        {
            let bytes = encode_proc_request(request, 7);
            assert_eq!((bytes.len(), &bytes[..4]), (length, &(length as u32).to_ne_bytes()[..]));
            assert_eq!(bytes[32..34], (length as u16 - 36).to_ne_bytes());
        }
    }

    proptest! {
        #[test]
        fn arbitrary_datagrams_do_not_panic(bytes: Vec<u8>, at in 0usize..76, byte: u8) {
            let _ = proc_event(&bytes);
            let mut spoilt = exec_datagram();
            spoilt[at] = byte;
            let _ = proc_event(&spoilt);
        }
    }
}
