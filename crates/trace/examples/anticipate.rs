//! What anticipatory prefault saves and wastes on recordings: `anticipate [ORDER] [FILES]`.

use faultless_trace::{anticipate, read, recordings};
use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1).peekable();
    let order = args.next_if(|arg| arg.parse::<u8>().is_ok());
    let order = order.map_or(Ok(5), |order| order.parse())?;
    let mut programs = Vec::new();
    for file in args {
        let path = Path::new(&file);
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        programs.push((name, read(path)?));
    }
    if programs.is_empty() {
        for recording in recordings::all() {
            programs.push((recording.name.to_owned(), recording.trace()?));
        }
    }
    println!("windows of at most {} pages", 1 << order);
    println!(
        "program      faults   left  avoided  perfect    ahead   wasted         peak untouched / resident"
    );
    let (mut sum, mut worst, mut bound, mut ahead, mut wasted) = (0.0, 1.0f64, 0.0, 0, 0);
    for (name, trace) in &programs {
        let got = anticipate::streams(trace, order);
        let best = if std::env::var_os("QUICK").is_some() {
            Default::default()
        } else {
            anticipate::perfect(trace, order)
        };
        println!(
            "{name:10} {:8} {:6} {:7.1}% {:7.1}% {:8} {:7} {:6.2}% {:8} / {:7}",
            got.faults,
            got.left,
            100.0 * got.avoided(),
            100.0 * best.avoided(),
            got.ahead,
            got.wasted,
            100.0 * got.waste(),
            got.peak_untouched,
            got.peak_resident,
        );
        sum += got.avoided();
        bound += best.avoided();
        worst = worst.min(got.avoided());
        ahead += got.ahead;
        wasted += got.wasted;
    }
    let n = programs.len() as f64;
    println!(
        "avoided {:.1}% on average, {:.1}% at worst (perfect {:.1}%); wasted {:.2}%",
        100.0 * sum / n,
        100.0 * worst,
        100.0 * bound / n,
        100.0 * f64::from(wasted as u32) / ahead as f64
    );
    Ok(())
}
