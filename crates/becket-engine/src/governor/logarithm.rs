//! The natural logarithm, for gains. The standard library has libm's, and this law would be the only one in the whole program to
//! need that library: each short command, too, would have it loaded, for nine page faults and as many system calls.

use std::f64::consts::{LN_2, SQRT_2};

/// Digits of the significand.
const DIGITS: u32 = 52;
const BIAS: u16 = 1023;
/// Terms of the series: the last one is below a unit in the last place.
const TERMS: u32 = 11;

/// Of a positive number that is neither infinite nor so small that its digits are cut.
pub(super) fn ln(number: f64) -> f64 {
    if number.is_nan() {
        return number;
    }
    let bits = number.to_bits();
    // The number is `significand * 2^exponent`, with the significand as near to 1 as can be.
    let mut exponent = f64::from((bits >> DIGITS) as u16) - f64::from(BIAS);
    let mut significand = f64::from_bits(bits & ((1 << DIGITS) - 1) | u64::from(BIAS) << DIGITS);
    if significand > SQRT_2 {
        significand /= 2.0;
        exponent += 1.0;
    }
    // ln x = 2 artanh((x - 1) / (x + 1)), where artanh z = z + z^3 / 3 + z^5 / 5 ...
    let z = (significand - 1.0) / (significand + 1.0);
    let square = z * z;
    let series = (0..TERMS).rev().fold(0.0, |sum, term| sum * square + 1.0 / f64::from(2 * term + 1));
    exponent * LN_2 + 2.0 * z * series
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_standard_library_s() {
        assert_eq!(ln(1.0), 0.0);
        let mut number = 1e-6;
        while number < 1e6 {
            let exact = f64::ln(number);
            assert!(
                (ln(number) - exact).abs() <= 1e-15 * exact.abs().max(1.0),
                "{number}: {} {exact}",
                ln(number)
            );
            number *= 1.000_37;
        }
        assert!(ln(f64::NAN).is_nan());
    }
}
