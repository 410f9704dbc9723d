//! `strftime` for chat templates that print a date.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// A moment in UTC, in the parts that `strftime` prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UtcTime {
    year: i64,
    /// 1 to 12.
    month: u32,
    /// 1 to 31.
    day: u32,
    /// 1 to 366.
    day_of_year: u32,
    /// 0 is Sunday.
    weekday: u32,
    second_of_day: u32,
}

impl UtcTime {
    /// The present moment.
    pub fn now() -> Self {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
        Self::from_unix_seconds(i64::try_from(seconds).unwrap_or(0))
    }

    /// The moment `seconds` after 1970-01-01T00:00:00Z.
    ///
    /// The calendar arithmetic is Howard Hinnant's `civil_from_days`: years begin in March, so that the
    /// leap day is the last of its year, and 400 years are 146,097 days.
    pub fn from_unix_seconds(seconds: i64) -> Self {
        let days = seconds.div_euclid(86_400);
        let second_of_day = seconds.rem_euclid(86_400) as u32;
        let shifted = days + 719_468;
        let era = shifted.div_euclid(146_097);
        let day_of_era = shifted.rem_euclid(146_097);
        let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * from_march + 2) / 153;
        let day = (from_march - (153 * shifted_month + 2) / 5 + 1) as u32;
        let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 } as u32;
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let lengths = [31, 28 + u32::from(leap), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        let before: u32 = lengths[..month as usize - 1].iter().sum();
        Self { year, month, day, day_of_year: before + day, weekday: (days + 4).rem_euclid(7) as u32, second_of_day }
    }

    /// Formats like C's `strftime` in the C locale; directives that are not known stay as they are.
    pub fn format(&self, format: &str) -> String {
        let (hour, minute, second) =
            (self.second_of_day / 3_600, self.second_of_day / 60 % 60, self.second_of_day % 60);
        let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };
        let month_name = MONTHS[self.month as usize - 1];
        let day_name = DAYS[self.weekday as usize];
        let mut output = String::new();
        let mut characters = format.chars();
        while let Some(character) = characters.next() {
            if character != '%' {
                output.push(character);
                continue;
            }
            let mut directive = characters.next();
            // glibc's flag for "no padding".
            let unpadded = directive == Some('-');
            if unpadded {
                directive = characters.next();
            }
            let two = |value: u32| {
                if unpadded { value.to_string() } else { format!("{value:02}") }
            };
            let text = match directive {
                Some('Y') => self.year.to_string(),
                Some('y') => two(self.year.rem_euclid(100) as u32),
                Some('m') => two(self.month),
                Some('d') => two(self.day),
                Some('e') if unpadded => self.day.to_string(),
                Some('e') => format!("{:2}", self.day),
                Some('j') if unpadded => self.day_of_year.to_string(),
                Some('j') => format!("{:03}", self.day_of_year),
                Some('H') => two(hour),
                Some('I') => two(hour12),
                Some('M') => two(minute),
                Some('S') => two(second),
                Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
                Some('B') => month_name.to_owned(),
                Some('b' | 'h') => month_name[..3].to_owned(),
                Some('A') => day_name.to_owned(),
                Some('a') => day_name[..3].to_owned(),
                Some('w') => self.weekday.to_string(),
                Some('F') => self.format("%Y-%m-%d"),
                Some('T') => self.format("%H:%M:%S"),
                Some('D') => self.format("%m/%d/%y"),
                Some('Z') => "UTC".to_owned(),
                Some('z') => "+0000".to_owned(),
                Some('%') => "%".to_owned(),
                Some(other) => format!("%{other}"),
                None => "%".to_owned(),
            };
            output.push_str(&text);
        }
        output
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values from Python's `datetime.utcfromtimestamp(t).strftime(f)`.
    #[test]
    fn dates_agree_with_python() {
        let cases = [
            (0, "%Y-%m-%d %H:%M:%S %A %j", "1970-01-01 00:00:00 Thursday 001"),
            (951_782_400, "%d %b %Y", "29 Feb 2000"),
            (1_735_689_599, "%F %T %p %I %a %B", "2024-12-31 23:59:59 PM 11 Tue December"),
            (1_735_689_599, "%j %y %e %%", "366 24 31 %"),
            (4_107_542_400, "%d %B %Y", "01 March 2100"),
            (-1, "%F %T", "1969-12-31 23:59:59"),
            (86_400 * 4, "%-d/%-m %w", "5/1 1"),
            (0, "%Q %", "%Q %"),
        ];
        for (seconds, format, expected) in cases {
            assert_eq!(UtcTime::from_unix_seconds(seconds).format(format), expected);
        }
    }
}
