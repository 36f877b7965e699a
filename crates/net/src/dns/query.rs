//! Which queries of a guest are forwarded, and the answers to those that are not.

use hickory_proto::{
    op::{Edns, Message, MessageType, OpCode, ResponseCode},
    rr::{DNSClass, RecordType},
};

/// The largest UDP answer for a client that does not announce a size.
const PLAIN_UDP: u16 = 512;
/// The largest UDP answer that is passed on: it fits any link without fragments.
const MAX_UDP: u16 = 1232;

/// A question to forward.
#[derive(Debug, Clone)]
pub(super) struct Query {
    message: Message,
}

/// How to treat a message of a guest.
#[derive(Debug)]
pub(super) enum Reading {
    Query(Query),
    /// Answer with this.
    Refuse(Vec<u8>),
    /// Not a query: an answer could start a loop.
    Ignore,
}

impl Query {
    pub(super) fn read(bytes: &[u8]) -> Reading {
        let Ok(message) = Message::from_vec(bytes) else { return malformed(bytes) };
        if message.metadata.message_type != MessageType::Query {
            return Reading::Ignore;
        }
        let query = Self { message };
        let code = match (query.message.metadata.op_code, query.message.queries.as_slice()) {
            (OpCode::Query, [question]) => match (question.query_class, question.query_type) {
                (_, RecordType::ANY | RecordType::AXFR | RecordType::IXFR) => ResponseCode::Refused,
                (DNSClass::IN, _) => return Reading::Query(query),
                _ => ResponseCode::Refused,
            },
            (OpCode::Query, _) => ResponseCode::FormErr,
            _ => ResponseCode::NotImp,
        };
        query.reply(code, false).map_or(Reading::Ignore, Reading::Refuse)
    }

    /// The message for the resolver: the question alone, with another id.
    pub(super) fn upstream(&self, id: u16) -> Option<Vec<u8>> {
        let asked = &self.message;
        let mut message = Message::new(id, MessageType::Query, OpCode::Query);
        message.metadata.recursion_desired = asked.metadata.recursion_desired;
        message.metadata.checking_disabled = asked.metadata.checking_disabled;
        message.metadata.authentic_data = asked.metadata.authentic_data;
        message.queries.clone_from(&asked.queries);
        if let Some(theirs) = &asked.edns {
            let mut edns = Edns::new();
            edns.set_max_payload(MAX_UDP);
            edns.set_dnssec_ok(theirs.flags().dnssec_ok);
            message.set_edns(edns);
        }
        message.to_vec().ok()
    }

    /// If this is the answer to [`Query::upstream`], returns the bytes for the guest and whether
    /// they are truncated.
    pub(super) fn accept(&self, id: u16, mut answer: Vec<u8>) -> Option<(Vec<u8>, bool)> {
        let message = Message::from_vec(&answer).ok()?;
        let fits = message.metadata.id == id
            && message.metadata.message_type == MessageType::Response
            && message.queries == self.message.queries;
        if !fits {
            return None;
        }
        answer.get_mut(..2)?.copy_from_slice(&self.message.metadata.id.to_be_bytes());
        Some((answer, message.metadata.truncation))
    }

    /// The largest answer that the guest accepts over UDP.
    pub(super) fn udp_limit(&self) -> usize {
        let said = self.message.edns.as_ref().map_or(PLAIN_UDP, Edns::max_payload);
        usize::from(said.clamp(PLAIN_UDP, MAX_UDP))
    }

    /// Tells the guest to ask again over TCP.
    pub(super) fn truncated(&self) -> Option<Vec<u8>> {
        self.reply(ResponseCode::NoError, true)
    }

    /// Tells the guest that no resolver answered.
    pub(super) fn failure(&self) -> Option<Vec<u8>> {
        self.reply(ResponseCode::ServFail, false)
    }

    fn reply(&self, code: ResponseCode, truncation: bool) -> Option<Vec<u8>> {
        let asked = &self.message.metadata;
        let mut message = Message::response(asked.id, asked.op_code);
        message.metadata.recursion_desired = asked.recursion_desired;
        message.metadata.recursion_available = true;
        message.metadata.response_code = code;
        message.metadata.truncation = truncation;
        message.queries.extend(self.message.queries.iter().take(1).cloned());
        if self.message.edns.is_some() {
            let mut edns = Edns::new();
            edns.set_max_payload(MAX_UDP);
            message.set_edns(edns);
        }
        message.to_vec().ok()
    }
}

/// FORMERR if at least the header is that of a query.
fn malformed(bytes: &[u8]) -> Reading {
    match bytes {
        [high, low, flags, ..] if bytes.len() >= 12 && flags & 0x80 == 0 => {
            let id = u16::from_be_bytes([*high, *low]);
            let message = Message::error_msg(id, OpCode::Query, ResponseCode::FormErr);
            message.to_vec().map_or(Reading::Ignore, Reading::Refuse)
        }
        _ => Reading::Ignore,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hickory_proto::{op, rr::Name};

    fn question(kind: RecordType) -> Message {
        let mut message = Message::new(7, MessageType::Query, OpCode::Query);
        message.metadata.recursion_desired = true;
        message.add_query(op::Query::query(Name::from_ascii("example.com.").unwrap(), kind));
        message
    }

    fn read(message: &Message) -> Reading {
        Query::read(&message.to_vec().unwrap())
    }

    fn refused(message: &Message) -> ResponseCode {
        match read(message) {
            Reading::Refuse(answer) => Message::from_vec(&answer).unwrap().metadata.response_code,
            other => panic!("{other:?}"),
        }
    }

    fn query(message: &Message) -> Query {
        match read(message) {
            Reading::Query(query) => query,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn only_one_plain_question_is_forwarded() {
        assert_eq!(refused(&question(RecordType::ANY)), ResponseCode::Refused);
        assert_eq!(refused(&question(RecordType::AXFR)), ResponseCode::Refused);
        let mut message = question(RecordType::A);
        message.metadata.op_code = OpCode::Notify;
        assert_eq!(refused(&message), ResponseCode::NotImp);
        let mut message = question(RecordType::A);
        message.add_query(op::Query::new());
        assert_eq!(refused(&message), ResponseCode::FormErr);
        let mut message = question(RecordType::A);
        message.queries[0].set_query_class(DNSClass::CH);
        assert_eq!(refused(&message), ResponseCode::Refused);
        let mut message = question(RecordType::A);
        message.metadata.message_type = MessageType::Response;
        assert!(matches!(read(&message), Reading::Ignore));
    }

    #[test]
    fn rubbish_is_answered_or_ignored() {
        assert!(matches!(Query::read(&[]), Reading::Ignore));
        assert!(matches!(Query::read(&[0xff; 64]), Reading::Ignore));
        let mut half = question(RecordType::A).to_vec().unwrap();
        half.truncate(15);
        assert!(matches!(Query::read(&half), Reading::Refuse(_)));
    }

    #[test]
    fn only_the_answer_to_our_question_comes_back() {
        let query = query(&question(RecordType::A));
        let sent = Message::from_vec(&query.upstream(99).unwrap()).unwrap();
        assert_eq!(sent.metadata.id, 99);
        assert!(sent.metadata.recursion_desired && sent.edns.is_none());
        let mut answer = sent.into_response();
        let (bytes, cut) = query.accept(99, answer.to_vec().unwrap()).unwrap();
        assert!(!cut);
        assert_eq!(Message::from_vec(&bytes).unwrap().metadata.id, 7);
        assert!(query.accept(98, answer.to_vec().unwrap()).is_none());
        answer.queries[0].set_query_type(RecordType::MX);
        assert!(query.accept(99, answer.to_vec().unwrap()).is_none());
    }

    #[test]
    fn options_do_not_go_upstream_and_sizes_are_bounded() {
        let mut message = question(RecordType::A);
        let mut edns = Edns::new();
        edns.set_max_payload(65_000).set_dnssec_ok(true);
        message.set_edns(edns);
        let query = query(&message);
        assert_eq!(query.udp_limit(), usize::from(MAX_UDP));
        let sent = Message::from_vec(&query.upstream(1).unwrap()).unwrap().edns.unwrap();
        assert!(sent.flags().dnssec_ok);
        assert_eq!(sent.max_payload(), MAX_UDP);
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_of_a_guest_or_a_resolver_panic(
            bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..300),
            at in 0usize..40,
            with in proptest::num::u8::ANY,
        ) {
            let _ = Query::read(&bytes);
            let mut near = question(RecordType::A).to_vec().unwrap();
            let at = at % near.len();
            near[at] = with;
            if let Reading::Query(query) = Query::read(&near) {
                let sent = query.upstream(1).unwrap();
                proptest::prop_assert!(query.accept(1, sent).is_none(), "a question is no answer");
                let _ = query.accept(1, bytes);
                proptest::prop_assert!(query.failure().is_some() && query.truncated().is_some());
            }
        }
    }
}
