//! SHA-256, by which an .xz file may say what its blocks yield, and which names what a store keeps.
//! It compares and names, and protects nothing: no secret ever passes through it.
//!
//! Followed: FIPS 180-4. A crate for it would bring six others; here a block of 64 bytes is two loops.

#[rustfmt::skip]
const FIRST: [u32; 8] = [
    0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19,
];

#[rustfmt::skip]
const ROUNDS: [u32; 64] = [
    0x428a_2f98, 0x7137_4491, 0xb5c0_fbcf, 0xe9b5_dba5, 0x3956_c25b, 0x59f1_11f1, 0x923f_82a4, 0xab1c_5ed5,
    0xd807_aa98, 0x1283_5b01, 0x2431_85be, 0x550c_7dc3, 0x72be_5d74, 0x80de_b1fe, 0x9bdc_06a7, 0xc19b_f174,
    0xe49b_69c1, 0xefbe_4786, 0x0fc1_9dc6, 0x240c_a1cc, 0x2de9_2c6f, 0x4a74_84aa, 0x5cb0_a9dc, 0x76f9_88da,
    0x983e_5152, 0xa831_c66d, 0xb003_27c8, 0xbf59_7fc7, 0xc6e0_0bf3, 0xd5a7_9147, 0x06ca_6351, 0x1429_2967,
    0x27b7_0a85, 0x2e1b_2138, 0x4d2c_6dfc, 0x5338_0d13, 0x650a_7354, 0x766a_0abb, 0x81c2_c92e, 0x9272_2c85,
    0xa2bf_e8a1, 0xa81a_664b, 0xc24b_8b70, 0xc76c_51a3, 0xd192_e819, 0xd699_0624, 0xf40e_3585, 0x106a_a070,
    0x19a4_c116, 0x1e37_6c08, 0x2748_774c, 0x34b0_bcb5, 0x391c_0cb3, 0x4ed8_aa4a, 0x5b9c_ca4f, 0x682e_6ff3,
    0x748f_82ee, 0x78a5_636f, 0x84c8_7814, 0x8cc7_0208, 0x90be_fffa, 0xa450_6ceb, 0xbef9_a3f7, 0xc671_78f2,
];

/// The digest of `bytes`.
pub fn sha256(bytes: &[u8]) -> [u8; 32] {
    let (blocks, rest) = bytes.as_chunks();
    let mut state = blocks.iter().fold(FIRST, absorb);
    // A bit, zeroes, and how many bits there were fill one or two blocks more.
    let mut end = rest.to_vec();
    end.push(0x80);
    end.resize((rest.len() + 9).next_multiple_of(64) - 8, 0);
    end.extend((bytes.len() as u64 * 8).to_be_bytes());
    let (blocks, _) = end.as_chunks();
    state = blocks.iter().fold(state, absorb);
    let mut digest = [0; 32];
    for (word, place) in state.iter().zip(digest.chunks_mut(4)) {
        place.copy_from_slice(&word.to_be_bytes());
    }
    digest
}

/// The state behind one more block.
fn absorb(state: [u32; 8], block: &[u8; 64]) -> [u32; 8] {
    let mut words = [0_u32; 16];
    for (word, bytes) in words.iter_mut().zip(block.as_chunks().0) {
        *word = u32::from_be_bytes(*bytes);
    }
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = state;
    for round in ROUNDS {
        // The oldest of the last sixteen words is used, and a new one takes its place at the end.
        let [word, second, .., seventh_last, _, _, _, _, before_last, _] = words;
        let low = second.rotate_right(7) ^ second.rotate_right(18) ^ (second >> 3);
        let high = before_last.rotate_right(17) ^ before_last.rotate_right(19) ^ (before_last >> 10);
        words.rotate_left(1);
        words[15] = word.wrapping_add(low).wrapping_add(seventh_last).wrapping_add(high);

        let sum = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
        let choice = (e & f) ^ (!e & g);
        let one = h.wrapping_add(sum).wrapping_add(choice).wrapping_add(round).wrapping_add(word);
        let sum = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
        let majority = (a & b) ^ (a & c) ^ (b & c);
        let other = sum.wrapping_add(majority);
        (h, g, f, e, d, c, b, a) = (g, f, e, d.wrapping_add(one), c, b, a, one.wrapping_add(other));
    }
    let mut next = state;
    for (word, add) in next.iter_mut().zip([a, b, c, d, e, f, g, h]) {
        *word = word.wrapping_add(add);
    }
    next
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        sha256(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn the_digests_are_those_of_the_standard() {
        for (bytes, digest) in [
            (vec![], "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
            (b"abc".to_vec(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
            (
                b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq".to_vec(),
                "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
            ),
            (vec![b'a'; 1_000_000], "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"),
        ] {
            assert_eq!(hex(&bytes), digest);
        }
    }
}
