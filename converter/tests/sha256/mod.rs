//! SHA-256 (FIPS 180-4), for the hashes of the stored oracles: short and slow on purpose.

/// The digest in hexadecimal.
pub fn hex(data: &[u8]) -> String {
    let mut state: [u32; 8] = fractions(2);
    let constants: [u32; 64] = fractions(3);
    let mut message = data.to_vec();
    message.push(0x80);
    message.resize((message.len() + 8).next_multiple_of(64) - 8, 0);
    message.extend((8 * data.len() as u64).to_be_bytes());
    for block in message.chunks_exact(64) {
        compress(&mut state, &constants, block);
    }
    state.iter().map(|word| format!("{word:08x}")).collect()
}

/// The first 32 fractional bits of the square (2) or cube (3) roots of the first primes.
fn fractions<const N: usize>(power: u32) -> [u32; N] {
    let mut primes = (2u128..).filter(|n| (2..*n).take_while(|d| d * d <= *n).all(|d| n % d != 0));
    // floor(2^32 * p^(1/power)) by bisection in integers.
    let fraction = |p: u128| {
        let (mut low, mut high) = (0u128, 1 << 37);
        while high - low > 1 {
            let middle = (low + high) / 2;
            // middle^power <= p * 2^(32 * power), without overflow: middle < 2^37, power <= 3.
            if middle.pow(power) <= p << (32 * power) { low = middle } else { high = middle }
        }
        low as u32
    };
    std::array::from_fn(|_| fraction(primes.next().expect("there is no last prime")))
}

fn compress(state: &mut [u32; 8], constants: &[u32; 64], block: &[u8]) {
    let mut w = [0u32; 64];
    for (word, bytes) in w.iter_mut().zip(block.as_chunks::<4>().0) {
        *word = u32::from_be_bytes(*bytes);
    }
    for i in 16..64 {
        let (a, b) = (w[i - 15], w[i - 2]);
        let s0 = a.rotate_right(7) ^ a.rotate_right(18) ^ (a >> 3);
        let s1 = b.rotate_right(17) ^ b.rotate_right(19) ^ (b >> 10);
        w[i] = w[i - 16].wrapping_add(s0).wrapping_add(w[i - 7]).wrapping_add(s1);
    }
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
    for (k, w) in constants.iter().zip(w) {
        let s1 = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
        let t1 = h.wrapping_add(s1).wrapping_add(e & f ^ !e & g).wrapping_add(*k).wrapping_add(w);
        let s0 = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
        let t2 = s0.wrapping_add(a & b ^ a & c ^ b & c);
        (h, g, f, e, d, c, b, a) = (g, f, e, d.wrapping_add(t1), c, b, a, t1.wrapping_add(t2));
    }
    for (old, new) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
        *old = old.wrapping_add(new);
    }
}
