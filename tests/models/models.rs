//! Runs the models. Each test has the name of its model.

use stratalloc_models as models;

macro_rules! tests {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            models::$name();
        })*
    };
}

tests! {
    a_missed_removal_is_reported_by_the_end_of_the_read
    two_replacements_during_reads_lose_no_value
    the_short_lock_orders_its_holders
    the_quota_is_never_exceeded_and_refuses_nothing_that_fits
    a_value_is_set_once
    a_growing_map_loses_no_value_to_readers
    the_event_queue_reports_each_event_once
}
