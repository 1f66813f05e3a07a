//! A Rust type registered under a name, with its own keys.

use stratalloc::config::{UserKey, from_environment};
use stratalloc::registry::{RegisterError, Registration};

use super::{User, build, sim};
use crate::common::prelude::*;

/// Allocates `step_bytes` from the driver for each request, whatever its size, and caches nothing.
#[derive(Debug)]
struct Steps {
    owner: OwnerId,
    step_bytes: u64,
    driver: Arc<dyn Driver>,
}

impl DeviceAllocator for Steps {
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        let address = self.driver.allocate(self.step_bytes)?;
        Ok(Allocation::new(address, request.bytes, self.owner, Token::default()))
    }

    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        self.driver.free(allocation.address(), self.step_bytes).expect("it was allocated so");
        Ok(())
    }
}

fn steps(name: &str) -> Registration {
    let step = format!("{name}_step_mb");
    let read = step.clone();
    Registration::new(name, move |driver, settings| {
        let step = settings.user_value(&read).map_or(Ok(2), str::parse::<u64>)?;
        Ok(Box::new(Steps { owner: OwnerId::next(), step_bytes: step << 20, driver }))
    })
    .about("steps of one size")
    .key(UserKey::whole(&step, 1..=1024, "size of a step"))
    .key(UserKey::flag(format!("{name}_zero"), "fill with zeros"))
    .key(UserKey::number(format!("{name}_part"), 0.0..=1.0, "part of the device"))
    .key(UserKey::one_of(format!("{name}_order"), &["first", "best"], "which step is taken"))
    .key(UserKey::checked(
        format!("{name}_sizes"),
        "a list of words",
        "which sizes",
        |text: &str| text.starts_with('['),
    ))
}

#[test]
fn a_type_with_keys_of_its_own_is_chosen_by_name_and_reads_them() {
    steps("steps").register().unwrap();
    let text = "backend:steps,steps_step_mb:8,steps_zero:tRuE,steps_part:0.5,steps_order:best,\
                steps_sizes:[a,b:1]";
    let config = config(text);
    let device = sim();
    let built = registry::build(&config, device.clone() as _, BuildOptions::default()).unwrap();
    let block = built.take(5);
    assert_eq!(device.held().segments, [(block.address(), 8 << 20)]);
    built.give(block);
    assert_eq!(
        Config::parse(&config.to_text(), &registry::key_table()).unwrap().settings(),
        config.settings()
    );
    let about = registry::backends().into_iter().find(|backend| backend.name == "steps").unwrap();
    assert_eq!(about.about, "steps of one size");
    let found = from_environment(&registry::key_table(), |name| {
        (name == "ALLOC_CONF").then(|| text.to_owned())
    });
    assert_eq!(found.unwrap().config.settings().user_value("steps_order"), Some("best"));
}

#[test]
fn a_value_out_of_range_gets_a_caret_and_changes_nothing() {
    steps("strict").register().unwrap();
    let table = registry::key_table();
    let before = config("backend:strict,strict_step_mb:4");
    for (value, expected) in [
        ("strict_step_mb:0", "a whole number from 1 to 1024"),
        ("strict_step_mb:1025", "a whole number from 1 to 1024"),
        ("strict_step_mb:+4", "a whole number from 1 to 1024"),
        ("strict_step_mb:[4]", "a whole number from 1 to 1024"),
        ("strict_step_mb:99999999999999999999999", "a whole number from 1 to 1024"),
        ("strict_zero:yes", "True or False"),
        ("strict_part:1.5", "a number from 0 to 1"),
        ("strict_part:NaN", "a number from 0 to 1"),
        ("strict_order:worst", "first or best"),
        ("strict_sizes:a", "a list of words"),
    ] {
        let text = format!("backend:strict,{value}");
        let error = before.updated(&text, &table).unwrap_err();
        let (key, value) = value.split_once(':').unwrap();
        assert_eq!((error.key.as_str(), error.expected.as_str()), (key, expected));
        let at = text.len() - value.len();
        assert_eq!(error.at(), at);
        let under = error.caret(&text).lines().last().unwrap().to_owned();
        assert_eq!(under, format!("{}{}", " ".repeat(at), "^".repeat(value.len())), "{text}");
        assert_eq!(before.settings().user_value("strict_step_mb"), Some("4"));
    }
    let error = Config::parse("strict_steps_mb:1", &table).unwrap_err();
    assert_eq!(error.nearest.as_deref(), Some("strict_step_mb"));
}

#[test]
fn keys_are_explained_and_idle_for_another_backend() {
    steps("idle").register().unwrap();
    let table = registry::key_table();
    let config = config("backend:native,idle_step_mb:4");
    let row = |key: &str| config.explain_with(&table).into_iter().find(|row| row.key == key);
    let set = row("idle_step_mb").unwrap();
    assert_eq!(
        (set.value.as_str(), set.note.as_str()),
        ("4", "size of a step - not in effect as such: backend:idle only",)
    );
    let unset = row("idle_zero").unwrap();
    assert_eq!((unset.value.as_str(), unset.note.as_str()), ("unset", "fill with zeros"));
    assert!(config.explain_with(&KeyTable::default()).iter().any(|row| row.key == "idle_step_mb"));
}

#[test]
fn bad_and_taken_names_are_refused() {
    let again = steps("once").register();
    assert_eq!(again, Ok(()));
    assert_eq!(steps("once").register(), Err(RegisterError::Taken("once".to_owned())));
    for taken in ["native", "pluggable", "cudaMallocAsync", "hipMallocAsync"] {
        let error = registry::register_callbacks(taken, User::with_bytes(0).callbacks());
        assert_eq!(error, Err(RegisterError::Taken(taken.to_owned())), "{taken}");
    }
    let long = "x".repeat(65);
    for bad in ["", "1st", "a b", "a:b", "a,b", "ä", "-a", "a\0", &long] {
        let error = registry::register_callbacks(bad, User::with_bytes(0).callbacks());
        assert_eq!(error, Err(RegisterError::BadName(bad.to_owned())), "{bad:?}");
    }
}

#[test]
fn bad_and_taken_keys_are_refused_with_their_prefix() {
    let with = |name: &str, key: &str| {
        let make = |_: Arc<dyn Driver>, _: &_| Err("never".into());
        Registration::new(name, make).key(UserKey::anything(key, "")).register()
    };
    for bad in ["other_size", "keyed_", "keyed", "keyed_Size", "keyed_a b", "max_split_size_mb"] {
        let error = with("keyed", bad).unwrap_err();
        assert!(error.to_string().contains("beginning with keyed_"), "{error}");
    }
    let error = with("malloc_async", "malloc_async_own_pool").unwrap_err();
    let (name, key) = ("malloc_async".to_owned(), "malloc_async_own_pool".to_owned());
    assert_eq!(error, RegisterError::KeyTaken { name, key });
    assert!(!registry::names().contains(&"keyed".to_owned()), "nothing has changed");
    with("keyed-up", "keyed_up_size").unwrap();
    assert!(matches!(with("keyed_up", "keyed_up_size"), Err(RegisterError::KeyTaken { .. })));
}

#[test]
fn a_name_keeps_its_meaning_once_it_is_registered() {
    assert!(matches!(build("backend:late"), Err(BuildError::UnknownBackend { .. })));
    registry::register_callbacks("late", User::with_bytes(0).callbacks()).unwrap();
    build("backend:late").unwrap();
    let error = registry::register_callbacks("late", User::with_bytes(0).callbacks()).unwrap_err();
    assert_eq!(error, RegisterError::Taken("late".to_owned()));
}

#[test]
fn a_constructor_reports_why_it_failed() {
    #[derive(Debug, thiserror::Error)]
    #[error("the moon is {0} km away")]
    struct TooFar(u32);
    registry::register("moon", |_, _| Err(TooFar(384_400).into())).unwrap();
    let error = build("backend:moon").unwrap_err();
    assert_eq!(error.to_string(), "backend:moon was not built: the moon is 384400 km away");
    assert!(matches!(error, BuildError::Refused { source, .. } if source.is::<TooFar>()));
    registry::register("far", |driver, _| {
        driver.allocate(u64::MAX)?;
        unreachable!("no device is as large")
    })
    .unwrap();
    assert!(matches!(build("backend:far"), Err(BuildError::Driver(_))));
}

/// Passes everything on to an allocator that records its own history, and has a name of its own.
#[derive(Debug)]
struct Around {
    inner: Strategy,
    name: Option<&'static str>,
}

impl DeviceAllocator for Around {
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        self.inner.allocate(request)
    }

    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        self.inner.free(allocation)
    }

    fn name(&self) -> &str {
        self.name.unwrap_or("user")
    }

    fn control(&self) -> Control<'_> {
        self.inner.control()
    }
}

#[test]
fn an_allocator_has_the_name_that_it_was_registered_with() {
    let around = |name| {
        move |driver, _: &Settings| -> Constructed {
            let inner = registry::build(&config(""), driver, BuildOptions::default())?;
            Ok(Box::new(Around { inner, name }))
        }
    };
    registry::register("named_around", around(None)).unwrap();
    registry::register("named_other", around(Some("inside"))).unwrap();
    registry::register("named_same", around(Some("named_same"))).unwrap();
    steps("named_steps").register().unwrap();
    for name in ["named_around", "named_other", "named_same", "named_steps"] {
        for layers in ["", ",layers:[statistics]", ",layers:[front]"] {
            let text = format!("backend:{name}{layers}");
            let device = sim();
            let driver = || Arc::clone(&device) as Arc<dyn Driver>;
            let built = registry::build(&config(&text), driver(), BuildOptions::default()).unwrap();
            assert_eq!(built.name(), name, "{text}");
            let block = built.take(4096);
            built.give(block);
            let handle = stratalloc::build("backend:native", driver()).unwrap();
            assert_eq!(handle.name(), "native");
            handle.switch(&text).unwrap();
            assert_eq!(handle.name(), name, "{text}");
            assert!(format!("{handle:?}").contains(name), "{handle:?}");
        }
    }
    let bare = registry::build(&config("backend:named_steps"), sim(), BuildOptions::default());
    let refused = bare.unwrap().caching_or_refuse().err().map(|error| error.to_string());
    assert_eq!(refused.as_deref(), Some("backend:named_steps has no cache to control"));
}
