use super::*;

/// Returns the order for a run of `run` used pages that ends below page 1,000, with unused pages
/// elsewhere, and checks that a run that begins above the page has the same order.
fn order_after(run: u64, most: u64) -> u8 {
    let within = |pages: Range<u64>| {
        move |page| if pages.contains(&page) { Seen::Used } else { Seen::Unused }
    };
    let order = longest_after(1000, most, within(1000 - run..1000));
    assert_eq!(longest_after(1000, most, within(1001..1001 + run)), order, "{run} pages above");
    order
}

/// A window after a long run has at most half of the pages of the run.
#[test]
fn window_is_half_of_a_long_run() {
    for run in LONG..512 {
        let window = 1 << order_after(run, 1000);
        assert!(window <= run / 2 && 2 * window > run / 2, "{window} pages after {run}");
    }
}

#[test]
fn short_run_does_not_limit_the_window() {
    for run in 0..LONG {
        assert_eq!(order_after(run, 1000), MAX_ORDER, "{run} pages");
    }
}

/// A search for a long run ends after `most` pages on each side.
#[test]
fn search_for_a_run_is_limited() {
    for most in LONG..100 {
        for above in [false, true] {
            let order = longest_after(1000, most, |page| {
                assert!((1000 - most..=1000 + most).contains(&page), "{page} of {most}");
                if (page > 1000) == above { Seen::Used } else { Seen::Empty }
            });
            assert_eq!(order, (most / 2).ilog2() as u8, "{most} pages, above: {above}");
        }
    }
}

/// The longer run of both sides counts, and a page between the run and the missing page ends the
/// search.
#[test]
fn longer_run_beside_the_page_counts() {
    let look = |page: u64| match page {
        980..=999 | 1001..=1064 => Seen::Used,
        _ => Seen::Empty,
    };
    assert_eq!(longest_after(1000, 200, look), 5);
    assert_eq!(
        longest_after(979, 200, |page| if page == 980 { Seen::Unused } else { look(page) }),
        MAX_ORDER
    );
    assert_eq!(
        longest_after(3, 200, |page| if page < 3 { Seen::Used } else { Seen::Empty }),
        MAX_ORDER
    );
}
