//! The handshake, driven without a socket.

use proptest::prelude::*;

use super::*;

fn shown(name: &str, read_only: bool) -> Shown {
    let (size, rotational, trims) = (1 << 30, false, true);
    Shown { name: name.into(), size, read_only, rotational, trims, smallest: 1, preferred: 4096 }
}

fn exports() -> Vec<Shown> {
    vec![shown("a", false), shown("b", true)]
}

/// One that has heard the client's flags, and whose greeting has been read.
fn begun(tls: bool) -> Handshake {
    let mut handshake = Handshake::new(exports(), tls);
    assert_eq!(handshake.take_output().len(), 18);
    handshake.hear(&3u32.to_be_bytes());
    assert_eq!(handshake.step(), Step::More);
    handshake
}

fn option(number: u32, data: &[u8]) -> Vec<u8> {
    [&uapi::OPTION_MAGIC.to_be_bytes()[..], &number.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data]
        .concat()
}

/// The replies that were given: option, type, data.
fn replies(handshake: &mut Handshake) -> Vec<(u32, u32, Vec<u8>)> {
    let output = handshake.take_output();
    let (mut rest, mut found) = (&output[..], Vec::new());
    while !rest.is_empty() {
        assert_eq!(uapi::u64_at(rest, 0), Some(uapi::OPTION_REPLY_MAGIC));
        let len = uapi::u32_at(rest, 16).unwrap() as usize;
        found.push((
            uapi::u32_at(rest, 8).unwrap(),
            uapi::u32_at(rest, 12).unwrap(),
            rest[20..20 + len].to_vec(),
        ));
        rest = &rest[20 + len..];
    }
    found
}

fn go(name: &str, infos: &[u16]) -> Vec<u8> {
    let infos: Vec<u8> = infos.iter().flat_map(|info| info.to_be_bytes()).collect();
    let count = (infos.len() / 2) as u16;
    [prefixed(name.as_bytes()), count.to_be_bytes().to_vec(), infos].concat()
}

#[test]
fn a_client_that_is_refused_hears_why() {
    let mut handshake = begun(true);
    handshake.hear(&option(uapi::OPT_STARTTLS, &[]));
    assert_eq!(handshake.step(), Step::StartTls);
    handshake.secured();
    handshake.refuse_stranger();
    handshake.take_output();
    let all = [uapi::OPT_LIST, uapi::OPT_STRUCTURED_REPLY, uapi::OPT_GO, 77];
    for number in all {
        handshake.hear(&option(number, &go("a", &[])));
    }
    assert_eq!(handshake.step(), Step::More);
    let policy = |number| (number, uapi::REP_ERR_POLICY, STRANGER.as_bytes().to_vec());
    assert_eq!(replies(&mut handshake), all.map(policy));
    handshake.hear(&option(uapi::OPT_EXPORT_NAME, b"a"));
    assert_eq!(handshake.step(), Step::End(STRANGER));
    assert!(handshake.take_output().is_empty(), "no reply could say it");
}

#[test]
fn a_client_chooses_an_export_and_what_follows_is_kept() {
    let mut handshake = begun(false);
    let context = [prefixed(b"b"), 1u32.to_be_bytes().to_vec(), prefixed(b"base:allocation")].concat();
    let words = [
        option(uapi::OPT_EXTENDED_HEADERS, &[]),
        option(uapi::OPT_SET_META_CONTEXT, &context),
        option(uapi::OPT_GO, &go("b", &[uapi::INFO_BLOCK_SIZE])),
        b"request".to_vec(),
    ];
    // One byte at a time.
    let mut step = Step::More;
    for byte in words.concat() {
        handshake.hear(&[byte]);
        step = handshake.step();
    }
    let agreed = Agreed { export: "b".into(), structured: true, extended: true, allocation: true };
    assert_eq!(step, Step::Agreed(1, agreed.clone()));
    let kinds: Vec<u32> = replies(&mut handshake).iter().map(|(_, kind, _)| *kind).collect();
    let wanted =
        [uapi::REP_ACK, uapi::REP_META_CONTEXT, uapi::REP_ACK, uapi::REP_INFO, uapi::REP_INFO, uapi::REP_ACK];
    assert_eq!(kinds, wanted);
    assert_eq!(handshake.step(), Step::Agreed(1, agreed.clone()), "asked again it says it again");
    assert_eq!(handshake.into_unread(), b"request");
    let text = serde_json::to_string(&agreed).unwrap();
    assert_eq!(serde_json::from_str::<Agreed>(&text).unwrap(), agreed);
}

#[test]
fn a_context_is_for_the_export_that_it_was_chosen_for() {
    let mut handshake = begun(false);
    let context = [prefixed(b"a"), 1u32.to_be_bytes().to_vec(), prefixed(b"base:allocation")].concat();
    handshake.hear(&option(uapi::OPT_STRUCTURED_REPLY, &[]));
    handshake.hear(&option(uapi::OPT_SET_META_CONTEXT, &context));
    handshake.hear(&option(uapi::OPT_GO, &go("b", &[])));
    let Step::Agreed(1, agreed) = handshake.step() else { panic!() };
    assert!(!agreed.allocation && agreed.structured && !agreed.extended);
}

#[test]
fn what_cannot_be_is_refused_and_the_conversation_goes_on() {
    let mut handshake = begun(false);
    let queries = [prefixed(b"a"), 1u32.to_be_bytes().to_vec(), prefixed(b"base:allocation")].concat();
    for (number, data, reply) in [
        (uapi::OPT_GO, go("c", &[]), uapi::REP_ERR_UNKNOWN),
        (uapi::OPT_GO, vec![0, 0, 0, 9], uapi::REP_ERR_INVALID),
        (uapi::OPT_LIST, vec![1], uapi::REP_ERR_INVALID),
        (uapi::OPT_SET_META_CONTEXT, queries, uapi::REP_ERR_INVALID),
        (uapi::OPT_STARTTLS, Vec::new(), uapi::REP_ERR_POLICY),
        (99, Vec::new(), uapi::REP_ERR_UNSUP),
        (uapi::OPT_GO, vec![0; LONGEST_OPTION + 1], uapi::REP_ERR_TOO_BIG),
    ] {
        handshake.hear(&option(number, &data));
        assert_eq!(handshake.step(), Step::More, "option {number}");
        let given = replies(&mut handshake);
        assert_eq!((given.len(), given[0].0, given[0].1), (1, number, reply));
    }
    handshake.hear(&option(uapi::OPT_LIST, &[]));
    assert_eq!(handshake.step(), Step::More);
    assert_eq!(replies(&mut handshake).len(), 3, "two exports and the end");
    handshake.hear(&option(uapi::OPT_ABORT, &[]));
    assert!(matches!(handshake.step(), Step::End(_)));
}

#[test]
fn without_tls_nothing_is_told_where_it_is_required() {
    let mut handshake = begun(true);
    for number in [uapi::OPT_LIST, uapi::OPT_STRUCTURED_REPLY, uapi::OPT_GO, uapi::OPT_INFO] {
        handshake.hear(&option(number, &[]));
        assert_eq!(handshake.step(), Step::More);
        assert_eq!(replies(&mut handshake)[0].1, uapi::REP_ERR_TLS_REQD);
    }
    handshake.hear(&option(uapi::OPT_STARTTLS, &[]));
    // What is put behind it in plain bytes belongs to TLS.
    handshake.hear(&option(uapi::OPT_ABORT, &[]));
    assert_eq!(handshake.step(), Step::StartTls);
    assert_eq!(handshake.secured(), option(uapi::OPT_ABORT, &[]));
    handshake.take_output();
    handshake.hear(&option(uapi::OPT_EXPORT_NAME, b"a"));
    let Step::Agreed(0, agreed) = handshake.step() else { panic!() };
    assert!(!agreed.structured);
    assert_eq!(handshake.take_output().len(), 10, "the client wants no zeroes");
    let mut handshake = begun(true);
    handshake.hear(&option(uapi::OPT_EXPORT_NAME, b"a"));
    assert!(matches!(handshake.step(), Step::End(_)));
}

proptest! {
    #[test]
    fn any_bytes_come_to_an_answer(
        tls: bool,
        words in prop::collection::vec((0u32..14, prop::collection::vec(any::<u8>(), 0..40), any::<bool>()), 0..20),
        noise in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let mut handshake = Handshake::new(exports(), tls);
        handshake.hear(&3u32.to_be_bytes());
        for (number, data, good) in words {
            match good {
                true => handshake.hear(&option(number, &go("a", &[3]))),
                false => handshake.hear(&option(number, &data)),
            }
            if handshake.step() == Step::StartTls {
                handshake.secured();
            }
            prop_assert!(handshake.take_output().len() < 64 << 10);
        }
        handshake.hear(&noise);
        handshake.step();
    }
}
