//! Tests of what the screen shows.

use super::super::rates::{Rate, Rates};
use super::*;
use std::path::PathBuf;

fn info(name: &str, image: &str) -> DeviceInfo {
    serde_json::from_value(serde_json::json!({
        "name": name, "device": "/dev/x", "transport": "ublk", "image": image, "offset": 0, "size_limit": null,
        "read_only": false, "block_size": 512, "queues": null, "depth": null, "mode": null, "autoclear": false,
        "reason": "", "size": 0, "direct_io": false, "direct_io_reason": "", "physical_block_size": 512,
        "state": "live", "partitions": [], "number": 0, "diskseq": null, "server_pid": null,
        "worker_pid": null, "isolated": false, "recoveries": 0, "warnings": [],
    }))
    .unwrap()
}

fn row(name: &str, reads: f64) -> Row {
    let read = Rate { operations_per_s: reads, bytes_per_s: reads * 4096.0, mean_ns: Some(81_300) };
    Row { info: info(name, &format!("/images/{name}.img")), rates: Some(Rates { read, ..Rates::default() }) }
}

const SECOND: Duration = Duration::from_secs(1);

fn names(view: &View, rows: &[Row]) -> Vec<String> {
    view.arranged(rows).into_iter().map(|row| row.info.name).collect()
}

#[test]
fn numbers_fit_their_columns() {
    let shown = [0.0, 0.4, 7.0, 9999.0, 10_000.0, 123_456.0, 1e9, 5e17].map(count);
    assert_eq!(shown, ["0", "0.4", "7", "9999", "10.0k", "123k", "1000M", "500P"]);
    assert_eq!([4096.0, 1_048_576.0, 3.5 * 1_073_741_824.0].map(bytes), ["4096", "1024k", "3584M"]);
    for power in 0..62 {
        assert!(count((1_u64 << power) as f64).len() <= 6, "{}", count((1_u64 << power) as f64));
        assert!(bytes((1_u64 << power) as f64).len() <= 6);
    }
}

#[test]
fn no_line_is_wider_than_the_screen_and_no_screen_longer() {
    let rows: Vec<Row> =
        (0..50).map(|n| row(&format!("device-with-a-long-name-{n}"), f64::from(n))).collect();
    for (width, height) in [(80, 24), (40, 10), (200, 60), (1, 1), (0, 0), (79, 3)] {
        let lines = View::default().lines(&rows, SECOND, (width, height));
        assert!(lines.iter().all(|line| line.text.chars().count() <= width), "{width} {lines:?}");
        assert!(lines.len() <= height.max(1), "{height} {lines:?}");
    }
    let lines = View::default().lines(&rows[..2], SECOND, (80, 24));
    assert_eq!(lines[1].look, Look::Head);
    let first = "~-a-long-name-1 ublk       1      0    4096       0  81.3us       -     0    -";
    assert_eq!(lines[3].text.trim_end(), first);
}

#[test]
fn the_busiest_comes_first_and_the_order_can_be_reversed() {
    let mut rows = vec![row("a", 5.0), row("b", 50.0), row("c", 0.5)];
    rows.push(Row { rates: None, ..row("d", 0.0) });
    let mut view = View { sort: Column::Reads, ..View::default() };
    assert_eq!(names(&view, &rows), ["b", "a", "c", "d"]);
    view.press(Key::Letter('r'), &rows, SECOND);
    assert_eq!(names(&view, &rows).last().unwrap(), "b");
    assert_eq!(names(&View::default(), &rows), ["a", "b", "c", "d"]);
    let all: Vec<Column> = (0..Column::ALL.len())
        .map(|_| {
            view.press(Key::Right, &rows, SECOND);
            view.sort
        })
        .collect();
    assert!(Column::ALL.iter().all(|column| all.contains(column)), "each can be reached: {all:?}");
    view.sort = Column::Name;
    view.press(Key::Left, &rows, SECOND);
    assert_eq!(view.sort, Column::Hits);
}

#[test]
fn a_filter_is_typed_kept_and_taken_back() {
    let mut rows = vec![row("root", 1.0), row("data", 2.0)];
    rows[1].info.spec.image = PathBuf::from("/srv/root-copy.img");
    let mut view = View::default();
    for key in [Key::Letter('/'), Key::Letter('r'), Key::Letter('q'), Key::Backspace, Key::Letter('o')] {
        assert_eq!(view.press(key, &rows, SECOND), Wish::Nothing, "letters of a filter are no commands");
    }
    assert_eq!(names(&view, &rows), ["root", "data"], "of names and of images");
    view.press(Key::Letter('o'), &rows, SECOND);
    view.press(Key::Letter('t'), &rows, SECOND);
    view.press(Key::Letter('-'), &rows, SECOND);
    view.press(Key::Enter, &rows, SECOND);
    assert_eq!(names(&view, &rows), ["data"]);
    assert!(view.lines(&rows, SECOND, (80, 24)).last().unwrap().text.contains("only: root-"));
    view.press(Key::Escape, &rows, SECOND);
    assert_eq!(names(&view, &rows), ["root", "data"]);
}

#[test]
fn a_device_is_detached_only_after_a_yes() {
    let rows = vec![row("a", 1.0), row("b", 2.0)];
    let mut view = View::default();
    assert_eq!(view.press(Key::Letter('d'), &rows, SECOND), Wish::Nothing);
    assert_eq!(view.press(Key::Letter('y'), &rows, SECOND), Wish::Nothing, "nothing was selected");
    view.press(Key::Down, &rows, SECOND);
    view.press(Key::Down, &rows, SECOND);
    view.press(Key::Letter('d'), &rows, SECOND);
    assert!(view.lines(&rows, SECOND, (80, 24)).last().unwrap().text.starts_with("detach b?"));
    assert_eq!(view.press(Key::Letter('x'), &rows, SECOND), Wish::Nothing);
    assert_eq!(view.press(Key::Letter('y'), &rows, SECOND), Wish::Nothing, "the question was answered");
    view.press(Key::Letter('d'), &rows, SECOND);
    assert_eq!(view.press(Key::Letter('y'), &rows, SECOND), Wish::Detach("b".to_owned()));
    // A device that went meanwhile is not asked about.
    view.press(Key::Letter('d'), &rows[..1], SECOND);
    assert_eq!(view.press(Key::Letter('y'), &rows[..1], SECOND), Wish::Nothing);
}

#[test]
fn the_selected_device_stays_in_view_and_a_bad_state_is_said() {
    let mut rows: Vec<Row> = (0..30).map(|n| row(&format!("n{n:02}"), 0.0)).collect();
    rows[29].info.state = DeviceState::Failing;
    rows[29].info.recoveries = 3;
    let mut view = View::default();
    for _ in 0..30 {
        view.press(Key::Down, &rows, SECOND);
    }
    let lines = view.lines(&rows, SECOND, (80, 10));
    let line = lines.iter().find(|line| line.text.contains("n29")).unwrap();
    assert_eq!((line.look, line.text.contains("failing, recovered 3 times")), (Look::Selected, true));
    assert!(lines[0].text.contains("30 devices, 1 not live"));
    view.press(Key::Up, &rows, SECOND);
    let lines = View::default().lines(&rows, SECOND, (80, 60));
    assert_eq!(lines.iter().filter(|line| line.look == Look::Bad).count(), 1);
}

#[test]
fn names_cannot_drive_the_terminal() {
    let rows = vec![Row { info: info("a\x1b[2Jb", "/x\n\x07"), rates: None }];
    let lines = View::default().lines(&rows, SECOND, (160, 24));
    assert!(lines.iter().all(|line| !line.text.contains(char::is_control)), "{lines:?}");
}

#[test]
fn intervals_have_bounds() {
    let mut view = View::default();
    let plus = |view: &mut View, from| match view.press(Key::Letter('+'), &[], from) {
        Wish::Interval(to) => to,
        other => panic!("{other:?}"),
    };
    assert_eq!(plus(&mut view, SECOND), 2 * SECOND);
    assert_eq!(plus(&mut view, 60 * SECOND), 60 * SECOND);
    let least = Wish::Interval(Duration::from_millis(250));
    assert_eq!(view.press(Key::Letter('-'), &[], Duration::from_millis(300)), least);
}
