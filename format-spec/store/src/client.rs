//! What a program does with stores.

use std::path::Path;
use std::sync::Arc;

use futures_util::StreamExt;
use serde::Serialize;
use tokio::runtime::{Builder, Runtime};
use vt_bundle::outside::{lies_in, refuse_inside};

use crate::cache::{Cache, CachedBundle};
use crate::contents::Contents;
use crate::error::StoreError;
use crate::hashing::{self, Hashers};
use crate::progress::{Meter, Progress, Silent};
use crate::pull::{self, Pulled};
use crate::reference::{Location, Pin, Reference};
use crate::sign::{self, SigningKey, Statement, VerifyingKey};
use crate::source::Source;
use crate::store::{Listed, Remote, Store};
use crate::stream;
use crate::upload::{self, Pushed};

/// How transfers are made.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Files on the way at once.
    pub jobs: usize,
    /// Plain HTTP for every host; for this machine it is taken anyway.
    pub plain_http: bool,
    /// Whether a push or a copy reads what the store has already, and stores anew what is damaged.
    pub verify_existing: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { jobs: 4, plain_http: false, verify_existing: false }
    }
}

/// What a reference stands for.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Listing {
    /// A reference without tag: the versions there are.
    Versions(Vec<Listed>),
    /// A reference to one version: its files.
    Files {
        /// Bundle id.
        id: String,
        /// Digest of the OCI manifest, in a store that has one.
        digest: Option<String>,
        /// Name, bytes and BLAKE3 of each.
        files: Vec<(String, u64, String)>,
    },
}

/// The signatures that a store has of a bundle.
#[derive(Clone, Debug)]
pub struct Signatures {
    /// Name and bytes of each.
    pub found: Vec<(String, Vec<u8>)>,
    /// Those that cannot be read, and why.
    pub unreadable: Vec<String>,
}

/// Moves bundles between folders and stores. Blocks; owns the threads that do the work.
#[derive(Debug)]
pub struct Client {
    runtime: Runtime,
    options: Options,
}

impl Client {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`StoreError::Io`] where the system has no more of them.
    pub fn new(options: Options) -> Result<Self, StoreError> {
        // Another part of the program may have chosen already; then its choice serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let runtime = Builder::new_multi_thread().enable_all().thread_name("vt-store").build();
        let runtime = runtime.map_err(StoreError::io(Path::new("threads")))?;
        Ok(Self { runtime, options })
    }

    fn store(&self, reference: &Reference, create: bool) -> Result<Store, StoreError> {
        Store::open_at(reference, self.options.plain_http, create)
    }

    /// Stores a bundle's folder under a tag. What is there already is not sent again.
    ///
    /// # Errors
    /// [`StoreError`]; a bundle whose files are not what its manifest says is not made known.
    pub fn push(&self, bundle: &Path, to: &Reference, progress: &Arc<dyn Progress>) -> Result<Pushed, StoreError> {
        let contents = upload::open_folder(bundle)?;
        check_target(to, &contents.id)?;
        to.location.folders().iter().try_for_each(|folder| refuse_inside(folder, bundle))?;
        let store = self.store(to, true)?;
        let source = Source::Folder(bundle);
        self.runtime.block_on(upload::upload(&source, contents, &store, to, &self.options, progress))
    }

    /// Fetches a bundle into a folder, where it appears complete and checked, or not at all.
    ///
    /// # Errors
    /// [`StoreError`]; what came so far is kept beside the folder and continued by the next call.
    pub fn pull(&self, from: &Reference, dir: &Path, progress: &Arc<dyn Progress>) -> Result<Pulled, StoreError> {
        if dir.symlink_metadata().is_ok() {
            return Err(StoreError::Exists { path: dir.to_owned() });
        }
        refuse_within(dir, &from.location)?;
        let store = self.store(from, false)?;
        self.runtime.block_on(async {
            let remote = store.resolve(from, &Meter::new(progress)).await?;
            let source = Source::Store(&store, &remote.contents);
            pull::pull(&source, &from.to_string(), &remote.contents, dir, self.options.jobs, progress).await
        })
    }

    /// Copies a bundle from store to store; its bytes pass through memory, piece by piece.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn copy(&self, from: &Reference, to: &Reference, progress: &Arc<dyn Progress>) -> Result<Pushed, StoreError> {
        if to.location != from.location {
            to.location.folders().iter().try_for_each(|folder| refuse_within(folder, &from.location))?;
        }
        let store = self.store(from, false)?;
        let target = self.store(to, true)?;
        self.runtime.block_on(async {
            let remote = store.resolve(from, &Meter::new(progress)).await?;
            check_target(to, &remote.contents.id)?;
            let source = Source::Store(&store, &remote.contents);
            upload::upload(&source, remote.contents.clone(), &target, to, &self.options, progress).await
        })
    }

    /// The versions of a name, or the files of a version.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn list(&self, reference: &Reference) -> Result<Listing, StoreError> {
        let store = self.store(reference, false)?;
        let meter = silent_meter();
        self.runtime.block_on(async {
            if reference.tag.is_none() && reference.pin.is_none() {
                return Ok(Listing::Versions(store.list(reference, &meter).await?));
            }
            let remote = store.resolve(reference, &meter).await?;
            let entries = remote.contents.entries.iter();
            Ok(Listing::Files {
                id: remote.contents.id.clone(),
                digest: remote.manifest.map(|m| m.digest),
                files: entries.map(|e| (e.path.clone(), e.size, e.blake3.clone())).collect(),
            })
        })
    }

    /// A bundle out of the cache, fetched if it is not there. A reference that pins a bundle id needs no store where the
    /// bundle is in the cache.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn cached(
        &self,
        from: &Reference,
        cache: &Cache,
        progress: &Arc<dyn Progress>,
    ) -> Result<CachedBundle, StoreError> {
        if let Some(Pin::Blake3(id)) = &from.pin
            && let Some(found) = cache.find(id)?
        {
            return Ok(found);
        }
        let store = self.store(from, false)?;
        self.runtime.block_on(async {
            let remote = store.resolve(from, &Meter::new(progress)).await?;
            let source = Source::Store(&store, &remote.contents);
            cache.get(&source, from, &remote.contents, self.options.jobs, progress).await
        })
    }

    /// Fetches anew those files of a bundle in the cache that are not what its manifest says; gives their names, `None`
    /// where there are none. What other bundles share is mended for them, too, when they are next fetched or mended.
    ///
    /// # Errors
    /// [`StoreError::Busy`] where another process uses the bundle; [`StoreError`] where it cannot be fetched.
    pub fn mend(
        &self,
        from: &Reference,
        cache: &Cache,
        held: CachedBundle,
        progress: &Arc<dyn Progress>,
    ) -> Result<Option<(CachedBundle, Vec<String>)>, StoreError> {
        let id = held.id.clone();
        // Its lock would be in the way of the one that is needed now.
        drop(held);
        let store = self.store(from, false)?;
        self.runtime.block_on(async {
            let Some(damage) = cache.damage(&id).await? else { return Ok(None) };
            // The tag may have moved since: wanted is the bundle that was being loaded.
            let pin = from.pin.clone().or(Some(Pin::Blake3(id)));
            let remote = store.resolve(&Reference { pin, ..from.clone() }, &Meter::new(progress)).await?;
            let source = Source::Store(&store, &remote.contents);
            let files = damage.files.clone();
            let mended = cache.renew(&source, from, &remote.contents, self.options.jobs, progress, damage).await?;
            Ok(Some((mended, files)))
        })
    }

    /// Signs a bundle's folder, every file of which is hashed and compared with the manifest first.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn sign_folder(
        &self,
        bundle: &Path,
        key: &SigningKey,
        progress: &Arc<dyn Progress>,
    ) -> Result<Vec<u8>, StoreError> {
        let statement = self.state_folder(bundle, progress)?;
        sign::sign(&statement, key)
    }

    /// What a signature of a bundle's folder has to say.
    fn state_folder(&self, bundle: &Path, progress: &Arc<dyn Progress>) -> Result<Statement, StoreError> {
        let mut contents = upload::open_folder(bundle)?;
        progress.begin("hashing", contents.total_bytes());
        self.runtime.block_on(async {
            for entry in &mut contents.entries {
                entry.sha256 = Some(hashing::checked_sha256(&bundle.join(&entry.path), entry).await?);
                progress.advance(entry.size);
            }
            Ok::<_, StoreError>(())
        })?;
        let name = std::fs::canonicalize(bundle).ok().and_then(|p| Some(p.file_name()?.to_string_lossy().into_owned()));
        Statement::new(&name.unwrap_or_else(|| "bundle".to_owned()), &contents)
    }

    /// Signs a bundle in a store, as it is there, without storing the signature. Every file is read.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn sign_stored(
        &self,
        reference: &Reference,
        key: &SigningKey,
        progress: &Arc<dyn Progress>,
    ) -> Result<Vec<u8>, StoreError> {
        let store = self.store(reference, false)?;
        let statement = self.runtime.block_on(async {
            let mut remote = store.resolve(reference, &Meter::new(progress)).await?;
            complete(&store, reference, &mut remote, progress).await?;
            Statement::new(&reference.name(), &remote.contents)
        })?;
        sign::sign(&statement, key)
    }

    /// Stores a signature beside a bundle: as a referrer in OCI, under `signatures/` in an object store. It must be of the
    /// bundle that is there.
    ///
    /// # Errors
    /// [`StoreError::Signature`] where it is of another bundle.
    pub fn attach(&self, reference: &Reference, signature: &[u8]) -> Result<(), StoreError> {
        let store = self.store(reference, true)?;
        let meter = silent_meter();
        self.runtime.block_on(async {
            let remote = store.resolve(reference, &meter).await?;
            let stated = sign::stated_manifest(&reference.to_string(), signature)?;
            let found = stream::sha256(&remote.contents.manifest_bytes);
            if stated != found {
                let reason =
                    format!("it is of another bundle: its manifest.json has sha256 {stated}, the one there {found}");
                return Err(StoreError::Signature { place: reference.to_string(), reason });
            }
            store.prepare(&meter).await?;
            store.attach(&remote, signature, &meter).await
        })
    }

    /// The signatures that a store has of a bundle.
    ///
    /// # Errors
    /// [`StoreError`]; a single signature that is damaged is no error.
    pub fn signatures(&self, reference: &Reference) -> Result<Signatures, StoreError> {
        let store = self.store(reference, false)?;
        let meter = silent_meter();
        self.runtime.block_on(async {
            let remote = store.resolve(reference, &meter).await?;
            let stored = store.signatures(&reference.to_string(), &remote, &meter).await?;
            let unreadable = stored.unreadable.iter().map(StoreError::to_string).collect();
            Ok(Signatures { found: stored.signatures, unreadable })
        })
    }

    /// Checks that one of some signatures is by a key and is of every file of a bundle's folder, no more and no less.
    /// Gives the number of files.
    ///
    /// # Errors
    /// [`StoreError::Signature`] for the last signature that does not hold.
    pub fn verify_signature(
        &self,
        bundle: &Path,
        place: &str,
        signatures: &[(String, Vec<u8>)],
        key: &VerifyingKey,
        progress: &Arc<dyn Progress>,
    ) -> Result<usize, StoreError> {
        let statement = self.state_folder(bundle, progress)?;
        let mut last =
            StoreError::Signature { place: place.to_owned(), reason: "there is none; sign it first".to_owned() };
        for (name, signature) in signatures {
            match sign::verify(name, signature, key, &statement) {
                Ok(files) => return Ok(files),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

fn silent_meter() -> Meter {
    let silent: Arc<dyn Progress> = Arc::new(Silent);
    Meter::new(&silent)
}

/// Refuses an output among the files of the store that it comes from. Two names of one folder are the same store.
fn refuse_within(output: &Path, store: &Location) -> Result<(), StoreError> {
    let Some(folder) = store.folders().into_iter().find(|f| lies_in(output, f) && !lies_in(f, output)) else {
        return Ok(());
    };
    let reason = format!("lies inside {}, which belongs to the store {store}; choose another place", folder.display());
    Err(StoreError::Unsupported { place: output.display().to_string(), reason })
}

/// A target that pins another bundle than the one that is stored there is a mistake.
fn check_target(to: &Reference, id: &str) -> Result<(), StoreError> {
    match &to.pin {
        None => Ok(()),
        Some(Pin::Blake3(pinned)) if pinned == id => Ok(()),
        Some(pin) => {
            Err(StoreError::Pin { place: to.to_string(), found: format!("blake3:{id}"), expected: pin.to_string() })
        }
    }
}

/// Gives every file its SHA-256 by reading it: a signature must not repeat what a store merely claims.
async fn complete(
    store: &Store,
    reference: &Reference,
    remote: &mut Remote,
    progress: &Arc<dyn Progress>,
) -> Result<(), StoreError> {
    let Remote { contents, .. } = remote;
    progress.begin("hashing", contents.total_bytes());
    let fixed: Contents = contents.clone();
    for entry in &mut contents.entries {
        let mut pieces = Source::Store(store, &fixed).open(entry, 0).await?;
        let mut hashers = Hashers::default();
        while let Some(piece) = pieces.next().await {
            let piece = piece?;
            hashers.update(&piece);
            progress.advance(piece.len() as u64);
        }
        let (blake3, sha256) = hashers.finish();
        if blake3 != entry.blake3 || entry.sha256.as_ref().is_some_and(|known| *known != sha256) {
            let (place, what) = (reference.to_string(), entry.path.clone());
            let expected = entry.sha256.clone().unwrap_or_default();
            let (found, expected) = match blake3 == entry.blake3 {
                true => (sha256, expected),
                false => (blake3, entry.blake3.clone()),
            };
            return Err(StoreError::Digest { place, what, found, expected });
        }
        entry.sha256 = Some(sha256);
    }
    Ok(())
}
