//! Names of the driver's calls, in one list.
//!
//! Drivers that count, charge or refuse calls agree on these names: they are the names of the
//! trait's methods. Infallible methods (`info`, `granularity_bytes`) have no name here.

macro_rules! calls {
    ($($variant:ident $name:ident,)*) => {
        /// A call to a driver.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Call {
            $(#[doc = concat!("`", stringify!($name), "`")] $variant,)*
        }

        impl Call {
            /// Every call, in the order of the variants.
            pub(crate) const ALL: [Self; [$(Self::$variant),*].len()] = [$(Self::$variant),*];

            /// The method's name.
            pub(crate) const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => stringify!($name),)*
                }
            }
        }
    };
}

calls! {
    MakeCurrent make_current,
    MemoryInfo memory_info,
    Allocate allocate,
    Free free,
    CreateStream create_stream,
    DestroyStream destroy_stream,
    SynchronizeStream synchronize_stream,
    SynchronizeDevice synchronize_device,
    CreateEvent create_event,
    RecordEvent record_event,
    QueryEvent query_event,
    SynchronizeEvent synchronize_event,
    WaitEvent wait_event,
    DestroyEvent destroy_event,
    Copy copy,
    CopyFromHost copy_from_host,
    CopyToHost copy_to_host,
    Fill fill,
    CaptureStatus capture_status,
    Reserve reserve,
    Unreserve unreserve,
    Create create,
    Release release,
    Map map,
    SetAccess set_access,
    Unmap unmap,
    Export export,
    Import import,
    ExportHandle export_handle,
    ImportHandle import_handle,
    DefaultPool default_pool,
    CreatePool create_pool,
    DestroyPool destroy_pool,
    SetReleaseThreshold set_release_threshold,
    ReleaseThreshold release_threshold,
    KeepMemory keep_memory,
    AllowReuse allow_reuse,
    OpenPool open_pool,
    AllocateAsync allocate_async,
    FreeAsync free_async,
    Trim trim,
    Usage usage,
    ResetHighMarks reset_high_marks,
    GraphUsage graph_usage,
    ResetGraphHighMarks reset_graph_high_marks,
    TrimGraphs trim_graphs,
    Share share,
    Open open,
    Close close,
    CanAccess can_access,
    EnableAccess enable_access,
    CopyPeer copy_peer,
    ExpectCaptures expect_captures,
    Expected expected,
    Begin begin,
    End end,
    Frontier frontier,
    Dependencies dependencies,
    AddToFrontier add_to_frontier,
    FreeBehind free_behind,
    List list,
}

impl Call {
    /// The call of that name.
    ///
    /// # Panics
    ///
    /// When no call has that name: a misspelt name in a test would otherwise never match.
    pub(crate) fn named(name: &str) -> Self {
        Self::ALL
            .into_iter()
            .find(|call| call.name() == name)
            .unwrap_or_else(|| panic!("no driver call is named {name:?}"))
    }
}
