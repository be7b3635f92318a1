//! `cargo xtask boot`: a machine with systemd whose file systems lie on becket's devices, started once.
//! Never takes a file that `make install` installs from anywhere else: units, rules and generator are under
//! test.

mod late;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::exec;
use crate::vm::{Machine, Place, Series, show};

/// What the guest checks once it is up: first the part common to all scripts, last the part for the machine's
/// shutdown.
const SCRIPT: [&str; 4] = [CHECKS, include_str!("boot/script.sh"), USERS, include_str!("boot/late.sh")];
const CHECKS: &str = include_str!("boot/checks.sh");
/// Users without privileges, which are checked alone too.
const USERS: &str = include_str!("boot/users.sh");
const ALONE: [&str; 4] = [UDEV, CHECKS, USERS, "exit $code\n"];
const UDEV: &str = "
modprobe ublk_drv; /lib/systemd/systemd-udevd --daemon; udevadm trigger --action=add; udevadm settle
";
/// A line of the table that makes no sense, in the middle of the others.
const WRONG: &str = "wrong /srv/images/0.squashfs flat=yes";

/// Arguments of `cargo xtask boot`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// SquashFS images in /etc/beckettab, each mounted by a line of /etc/fstab
    #[arg(long, default_value_t = 69)]
    images: u32,
    /// Which kernel to boot
    #[arg(long, default_value = "7.x")]
    kernel: Series,
    /// Install this becket instead of the one of this checkout
    #[arg(long, value_name = "PATH")]
    becket: Option<PathBuf>,
    /// Show the kernel's console as it comes
    #[arg(long, short)]
    verbose: bool,
}

/// Boots the machine and shows what it checks; the guest's exit code.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let becket = match &args.becket {
        Some(becket) => becket.clone(),
        None => exec::shipped()?,
    };
    let work = tempfile::tempdir()?;
    let mut machine = machine(args.kernel, args.images, &becket, work.path())?;
    machine.verbose = args.verbose;
    let code = boot(&machine, &mut show)?;
    println!("the boot's log is kept in {}", log().display());
    Ok(code)
}

/// Boots the machine until it has powered itself off, and looks at what it has left; its exit code.
pub(crate) fn boot(machine: &Machine, output: &mut dyn FnMut(&[u8])) -> Result<u8> {
    let code = machine.boot(output)?;
    let well = late::check(&kept("boot.disk"), output);
    Ok(if code == 0 { u8::from(!well) } else { code })
}

/// Where something of the guest is kept.
fn kept(name: &str) -> PathBuf {
    exec::target_dir().join("vm").join(name)
}

/// Where the guest's journal is kept.
fn log() -> PathBuf {
    kept("boot.log")
}

/// The machine, with what goes into it laid out in `work`.
pub(crate) fn machine(series: Series, images: u32, becket: &Path, work: &Path) -> Result<Machine> {
    let install = install(becket, work)?;
    let folder = work.join("images");
    std::fs::create_dir(&folder)?;
    for number in 0..images {
        squashfs(&folder, number).with_context(|| format!("cannot make image {number}"))?;
    }
    std::fs::write(work.join("beckettab"), table(images))?;
    std::fs::write(work.join("fstab"), fstab(images))?;

    let mut machine = Machine::new(series, format!("IMAGES={images}\n{}", SCRIPT.concat()));
    machine.systemd = true;
    machine.kept_scratch = Some(kept("boot.disk"));
    machine.timeout = Duration::from_secs(900 + u64::from(images) * 20);
    machine.files = vec![
        place(install.join("usr"), "/usr"),
        place(folder, "/srv/images"),
        place(work.join("beckettab"), "/etc/beckettab"),
        place(work.join("fstab"), "/etc/fstab"),
    ];
    machine.outs = vec![Place { host: log(), guest: "/root/boot.log".to_owned() }];
    Ok(machine)
}

/// What users without privileges have, in a guest without systemd where `make install` has put its files.
pub(crate) fn users() -> String {
    ALONE.concat()
}

/// Puts in place what `make install` does; where it is.
pub(crate) fn install(becket: &Path, work: &Path) -> Result<PathBuf> {
    let install = work.join("install");
    let words = [
        "PREFIX=/usr".to_owned(),
        format!("DESTDIR={}", install.display()),
        format!("BECKET={}", becket.display()),
    ];
    exec::quietly(&mut exec::make("install", &words.each_ref().map(String::as_str)))?;
    Ok(install)
}

fn place(host: PathBuf, guest: &str) -> Place {
    Place { host, guest: guest.to_owned() }
}

/// An image with a file that says which one it is.
fn squashfs(folder: &Path, number: u32) -> Result<()> {
    let tree = folder.join("tree");
    std::fs::create_dir_all(&tree)?;
    std::fs::write(tree.join("id"), format!("{number}\n"))?;
    exec::quietly(
        Command::new("mksquashfs").arg(&tree).arg(folder.join(format!("{number}.squashfs"))).args([
            "-noappend",
            "-quiet",
            "-no-progress",
            "-all-root",
        ]),
    )?;
    Ok(std::fs::remove_dir_all(&tree)?)
}

/// Half of the names have a dash, which unit names write otherwise. The last device is for the load.
fn name(number: u32) -> String {
    if number.is_multiple_of(2) { format!("snap-{number}") } else { format!("snap{number}") }
}

fn table(images: u32) -> String {
    let mut text = String::from("# NAME IMAGE OPTIONS\n");
    for number in 0..images {
        if number == images / 2 {
            text.push_str(WRONG);
            text.push('\n');
        }
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{} /srv/images/{number}.squashfs ro,via=ublk", name(number));
    }
    text.push_str("exported /srv/images/0.squashfs ro,nbd=unix:/run/exported.sock\n");
    text.push_str("load /scratch/load.img noauto,via=ublk\n");
    text
}

fn fstab(images: u32) -> String {
    (0..images).fold(String::new(), |mut text, number| {
        let _ = writeln!(text, "/dev/becket/{} /srv/mnt/{number} squashfs ro 0 0", name(number));
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_holds_every_image_and_one_wrong_line() {
        let (table, fstab) = (table(5), fstab(5));
        assert_eq!(table.lines().filter(|line| line.contains("ro,via=ublk")).count(), 5);
        assert_eq!(table.lines().filter(|line| *line == WRONG).count(), 1);
        assert!(fstab.contains("/dev/becket/snap-4 /srv/mnt/4 squashfs ro 0 0\n"));
        assert_eq!(fstab.lines().count(), 5);
    }

    /// Put together, the parts are what bash takes.
    #[test]
    fn the_scripts_are_whole() {
        for script in [SCRIPT.concat(), ALONE.concat()] {
            let parsed = Command::new("bash").args(["-n", "-c", &script]).output().unwrap();
            assert!(parsed.status.success(), "{}", String::from_utf8_lossy(&parsed.stderr));
            assert!(script.contains("\ncheck a_user_has_a_device ") && script.contains("\ncheck() {"));
        }
    }

    /// What `make install` makes of the units is what systemd takes, to the letter.
    #[test]
    fn the_units_are_sound() {
        let temp = tempfile::tempdir().unwrap();
        let prefix = temp.path().join("usr");
        let verify = |units: &[&str]| -> (bool, String) {
            let dir = prefix.join("lib/systemd/system");
            let mut command = Command::new("systemd-analyze");
            command.args(["verify", "--man=no"]).args(units.iter().map(|unit| dir.join(unit)));
            let done = command.output().expect("systemd-analyze; scripts/setup.sh installs it");
            let said = String::from_utf8_lossy(&done.stderr);
            // A key of systemd 255, which older ones say that they ignore.
            let said = said.lines().filter(|line| !line.contains("'SurviveFinalKillSignal'"));
            (done.status.success(), said.collect::<Vec<_>>().join("\n"))
        };
        let place = format!("PREFIX={}", prefix.display());
        exec::quietly(&mut exec::make("install", &["BECKET=/bin/true", &place])).unwrap();
        let units = [
            "becket.socket",
            "becket.service",
            "becket-attach@.service",
            "becket-metrics.socket",
            "becket-metrics.service",
            "becket-storage.socket",
            "becket-storage.service",
        ];
        assert_eq!(verify(&units), (true, String::new()));
        // Had there been something wrong, it would have been said.
        let unit = prefix.join("lib/systemd/system/becket-attach@.service");
        let text = std::fs::read_to_string(&unit).unwrap();
        std::fs::write(&unit, text.replace("Type=oneshot", "Type=onceshot")).unwrap();
        assert!(verify(&units).1.contains("onceshot"));
        // And all is where it is looked for.
        for file in [
            "bin/becket",
            "share/man/man5/beckettab.5",
            "share/bash-completion/completions/becket",
            "share/zsh/site-functions/_becket",
            "share/fish/vendor_completions.d/becket.fish",
            "lib/udev/rules.d/90-becket.rules",
            "share/becket/91-becket-users.rules",
        ] {
            assert!(prefix.join(file).is_file(), "{file}");
        }
        let generator = std::fs::canonicalize(prefix.join("lib/systemd/system-generators/becket-generator"));
        assert_eq!(generator.unwrap(), std::fs::canonicalize(prefix.join("bin/becket")).unwrap());
    }
}
