//! Random histories of requests, frees, pauses and resumes, compared with a model of every block's bytes.

use super::*;
use crate::common::folder::Folder;

const STREAMS: [StreamId; 3] = [HOME, SIDE, FAR];
const DEVICE_BYTES: u64 = 192 * MIB;

/// A live block.
struct Block {
    allocation: Allocation,
    /// The tag, or the default pool.
    pool: PoolId,
    stream: StreamId,
    /// What its bytes were derived from. `None`: undefined.
    seed: Option<u64>,
}

struct Story {
    /// Where some tags save contents.
    folder: Folder,
    host: Arc<Host>,
    allocator: Strategy,
    tags: Vec<(PoolId, Backup)>,
    blocks: Vec<Block>,
    rng: Rng,
    next_seed: u64,
    /// The number of resumes that were tried.
    resumes: u64,
    /// The number of those that failed because memory was missing.
    failed_resumes: u64,
}

impl Story {
    fn new(seed: u64) -> Self {
        let host = Arc::new(Host::with_bytes(DEVICE_BYTES));
        let mut rng = Rng::new(seed);
        let allocator = built(BOTH[rng.below(2)], host.clone());
        let folder = Folder::new(&format!("tag-history-{seed}"));
        let (mut tags, default) = (Vec::new(), TagOptions::default());
        for at in 0..3 {
            let pool = PoolId { user: 77 + at, ..TAG };
            let name = format!("tag {at}");
            let backup = if rng.below(4) == 0 { Backup::None } else { Backup::Host };
            let keep_backup = rng.below(2) == 0;
            let directory = (rng.below(8) == 0).then(|| folder.0.clone());
            let keep_free = rng.below(3) == 0;
            let tag =
                TagOptions { name, backup, keep_backup, directory, keep_free, ..default.clone() };
            allocator.private_pools().create_pool(pool, tagged(tag)).expect("its id is new");
            tags.push((pool, backup));
        }
        let (blocks, next_seed, resumes, failed_resumes) = (Vec::new(), 1, 0, 0);
        Self { folder, host, allocator, tags, blocks, rng, next_seed, resumes, failed_resumes }
    }

    fn sleeping(&self) -> &dyn Sleeping {
        sleeping(&self.allocator)
    }

    fn is_awake(&self, pool: PoolId) -> bool {
        let tag = self.sleeping().tag_info(pool);
        pool == PoolId::DEFAULT || tag.expect("it is a tag").state == TagState::Awake
    }

    fn step(&mut self) -> Checked {
        match self.rng.below(20) {
            0..=5 => self.allocate(),
            6..=9 => self.free(),
            10 => self.write(),
            11 => self.verify_one(),
            12 => self.record(),
            13..=14 => self.pause(),
            15..=16 => self.resume(),
            17 => self.allocator.caching().empty_cache().map_err(|error| error.to_string()),
            18 => self.limit(),
            _ => self.switch_segments(),
        }
    }

    fn allocate(&mut self) -> Checked {
        let stream = STREAMS[self.rng.below(3)];
        let bytes = match self.rng.below(3) {
            0 => self.rng.among(1..100 * KIB),
            1 => self.rng.among(MIB..4 * MIB),
            _ => self.rng.among(4 * MIB..24 * MIB),
        };
        let pool = match self.rng.below(4) {
            3 => PoolId::DEFAULT,
            at => self.tags[at].0,
        };
        match self.allocator.allocate(Request::new(bytes, stream).in_pool(pool)) {
            Ok(allocation) => {
                ensure!(self.is_awake(pool), "a tag that sleeps served a request");
                let seed = Some(self.next_seed);
                self.blocks.push(Block { allocation, pool, stream, seed });
                self.write_block(self.blocks.len() - 1);
                Ok(())
            }
            Err(AllocError::OutOfMemory(_)) => Ok(()),
            Err(AllocError::Pool(error)) if matches!(*error, PoolError::Asleep { .. }) => {
                ensure!(!self.is_awake(pool), "a tag that is awake refused a request");
                Ok(())
            }
            Err(error) => Err(error.to_string()),
        }
    }

    fn write_block(&mut self, at: usize) {
        let seed = self.next_seed;
        self.next_seed += 1;
        let block = &mut self.blocks[at];
        write_ends(&*self.host, &block.allocation, seed, block.stream);
        block.seed = Some(seed);
    }

    fn pick(&mut self) -> Option<usize> {
        if self.blocks.is_empty() { None } else { Some(self.rng.below(self.blocks.len())) }
    }

    fn free(&mut self) -> Checked {
        let Some(at) = self.pick() else { return Ok(()) };
        self.verify(at)?;
        let block = self.blocks.swap_remove(at);
        self.allocator.free(block.allocation).map_err(|error| error.to_string())
    }

    fn write(&mut self) -> Checked {
        if let Some(at) = self.pick()
            && self.is_awake(self.blocks[at].pool)
        {
            self.write_block(at);
        }
        Ok(())
    }

    fn verify_one(&mut self) -> Checked {
        self.pick().map_or(Ok(()), |at| self.verify(at))
    }

    /// Compares a block's bytes with the model: in memory, or in the backup.
    fn verify(&self, at: usize) -> Checked {
        let Block { allocation, pool, stream, seed } = &self.blocks[at];
        let (address, bytes) = (allocation.address(), allocation.size_bytes());
        let Some(seed) = *seed else { return Ok(()) };
        if self.is_awake(*pool) {
            ensure!(holds_ends(&*self.host, allocation, seed, *stream), "{address:#x} has changed");
            return Ok(());
        }
        let [_, (last, count)] = ends(address, bytes);
        let mut found = vec![0; usize::try_from(count).expect("it is small")];
        self.sleeping().read_backup(last, &mut found).map_err(|error| error.to_string())?;
        ensure!(found == pattern(last, count, seed), "the backup of {address:#x} has changed");
        Ok(())
    }

    fn record(&mut self) -> Checked {
        let Some(at) = self.pick() else { return Ok(()) };
        let stream = STREAMS[self.rng.below(3)];
        let block = &self.blocks[at];
        self.allocator.record(&block.allocation, stream);
        Ok(())
    }

    fn pause(&mut self) -> Checked {
        let (pool, own) = self.tags[self.rng.below(3)];
        let backup = [None, None, None, Some(Backup::None), Some(Backup::Host)][self.rng.below(5)];
        let was_awake = self.is_awake(pool);
        let before = self.sleeping().tag_info(pool).expect("it is a tag");
        let options = PauseOptions { backup, ..PauseOptions::default() };
        let paused = self.sleeping().pause(pool, &options).map_err(|error| error.to_string())?;
        if !was_awake {
            ensure_eq!(paused, Default::default(), "a second pause");
            return Ok(());
        }
        let live = before.live_bytes;
        if backup.unwrap_or(own) == Backup::Host {
            ensure_eq!(paused.copied_bytes, live, "the bytes copied");
        } else {
            let mut dropped: Vec<_> = paused.dropped.iter().map(|block| block.address).collect();
            dropped.sort_unstable();
            let gone = self.blocks.iter_mut().filter(|block| block.pool == pool);
            let mut expected = Vec::new();
            for block in gone {
                block.seed = None;
                expected.push(block.allocation.address());
            }
            expected.sort_unstable();
            ensure_eq!(dropped, expected, "the blocks whose contents are dropped");
        }
        let now = self.sleeping().tag_info(pool).expect("it is a tag");
        ensure_eq!((now.mapped_bytes, now.live_bytes), (0, live), "memory of a tag that sleeps");
        Ok(())
    }

    fn resume(&mut self) -> Checked {
        let (pool, _) = self.tags[self.rng.below(3)];
        self.resume_tag(pool)
    }

    fn resume_tag(&mut self, pool: PoolId) -> Checked {
        self.resumes += 1;
        match self.sleeping().resume(pool) {
            Ok(_) => {}
            Err(SleepError::OutOfMemory(report)) => {
                self.failed_resumes += 1;
                ensure!(!self.is_awake(pool), "a tag woke without memory");
                ensure!(report.missing_bytes > 0, "nothing is missing: {report}");
                return Ok(());
            }
            Err(error) => return Err(error.to_string()),
        }
        ensure!(self.is_awake(pool), "a resume that worked");
        let own = (0..self.blocks.len()).filter(|at| self.blocks[*at].pool == pool);
        own.into_iter().try_for_each(|at| self.verify(at))
    }

    fn limit(&mut self) -> Checked {
        let limit = [None, Some(100 * MIB), Some(160 * MIB)][self.rng.below(3)];
        self.allocator.caching().set_limit_bytes(limit);
        Ok(())
    }

    /// Chooses at random whether later segments are fixed or expandable.
    fn switch_segments(&mut self) -> Checked {
        let conf = config(BOTH[self.rng.below(2)]);
        let limit = self.allocator.caching().limit_bytes();
        self.allocator.caching().apply(&conf).map_err(|error| error.to_string())?;
        self.allocator.caching().set_limit_bytes(limit);
        Ok(())
    }

    fn check(&self) -> Checked {
        let engine = self.allocator.engine().expect("it is native");
        invariants::check_all(engine, self.host.used_bytes() - engine.unreleased_bytes())?;
        let live: u64 = self.blocks.iter().map(|block| block.allocation.size_bytes()).sum();
        let counted = self.allocator.stats().requested_bytes.all.current.unsigned_abs();
        ensure!(counted >= live, "{counted} bytes are counted, {live} are live");
        Ok(())
    }

    fn end(mut self) -> Checked {
        self.allocator.caching().set_limit_bytes(None);
        for at in 0..3 {
            // One tag after the other: together they may need more than the device has.
            let (pool, _) = self.tags[at];
            self.resume_tag(pool)?;
            for at in (0..self.blocks.len()).rev() {
                if self.blocks[at].pool == pool || self.blocks[at].pool == PoolId::DEFAULT {
                    self.verify(at)?;
                    let block = self.blocks.swap_remove(at);
                    self.allocator.free(block.allocation).map_err(|error| error.to_string())?;
                }
            }
            self.check()?;
        }
        ensure!(self.blocks.is_empty(), "all blocks are freed");
        ensure_eq!(self.folder.names().len(), 0, "files of backups");
        drop(self.allocator);
        ensure!(self.host.held().is_nothing(), "it leaks {:?}", self.host.held());
        Ok(())
    }
}

#[test]
fn random_histories_keep_every_byte() {
    let (mut resumes, mut failed) = (0, 0);
    for seed in 1..=runs(40) {
        let mut story = Story::new(seed);
        for step in 0..120 {
            let done = story.step().and_then(|()| story.check());
            if let Err(error) = done {
                panic!("history {seed}, step {step}: {error}");
            }
        }
        resumes += story.resumes;
        failed += story.failed_resumes;
        if let Err(error) = story.end() {
            panic!("the end of history {seed}: {error}");
        }
    }
    assert!(resumes > 5 * failed && failed > 0, "{failed} of {resumes} resumes failed");
}
