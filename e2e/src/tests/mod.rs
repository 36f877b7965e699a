//! The tests, by topic.

mod api;
mod bench;
mod clones;
mod clones_disk;
mod clones_random;
mod clones_services;
mod clones_time;
mod clones_traffic;
mod crash;
mod disk;
mod exec;
mod failpoints;
mod files;
mod gate;
mod lifecycle;
mod lineage;
mod load;
mod memory;
mod network;
mod observe;
mod ports;
mod previews;
mod programs;
mod races;
mod secrets;
mod sessions;
mod stale;
mod state;
pub mod templates;
mod times;
mod trees;

use crate::Test;
use anyhow::{Result, bail, ensure};

macro_rules! tests {
    ($($module:ident :: $name:ident),* $(,)?) => {
        vec![$((
            concat!(stringify!($module), "::", stringify!($name)),
            (|world| Box::pin($module::$name(world))) as Test,
        )),*]
    };
}

/// All of them, the quick ones first.
pub fn all() -> Vec<(&'static str, Test)> {
    tests![
        api::requests_are_checked_and_named,
        api::unknown_things_are_404,
        api::a_key_is_required_where_one_is_set,
        api::fork_tree_and_promote,
        exec::streams_exit_codes_and_surroundings,
        exec::a_timeout_kills_everything_it_started,
        exec::a_background_child_does_not_hold_the_call,
        exec::long_output_is_whole_in_the_stream_and_cut_in_the_buffer,
        exec::input_reaches_the_command,
        exec::many_at_once,
        files::odd_names_and_modes_survive,
        files::big_files_round_trip,
        files::errors_say_what_is_wrong,
        trees::a_tree_moves_whole_from_one_to_another,
        trees::hostile_archives_write_nothing,
        trees::cp_copies_trees_both_ways,
        trees::changes_are_told,
        trees::files_that_wait_are_read_to_where_they_are,
        programs::verbs_of_every_day,
        programs::a_forward_keeps_half_closes,
        programs::a_shell_on_a_terminal,
        programs::a_killed_template_build_is_gone_on_with,
        sessions::a_background_command_is_found_again,
        sessions::input_and_signals_reach_it,
        sessions::it_goes_on_in_a_fork_and_after_a_hibernation,
        sessions::a_terminal_is_left_and_come_back_to,
        sessions::a_paste_of_a_mebibyte_is_intact,
        sessions::twenty_terminals_and_commands_beside_each_other,
        sessions::a_deletion_ends_every_stream,
        ports::half_closed_connections_go_on,
        ports::resets_are_no_ends,
        ports::many_connections_and_stuck_ones,
        state::memory_tmpfs_and_disk_are_carried_by_fork_and_restore,
        state::unsynced_writes_are_of_the_same_instant,
        state::divergence_never_leaks,
        state::a_copy_is_a_new_individual,
        times::a_copy_of_a_busy_one_is_whole,
        times::a_week_later_the_clock_is_right,
        clones::identity_is_new_in_copies_and_kept_by_a_wake,
        clones::hooks_run_in_each_copy_and_can_refuse_it,
        clones::connections_with_the_outside_are_reset_at_once,
        clones::secrets_follow_their_fate,
        secrets::nothing_of_a_dropped_secret_is_in_a_snapshot,
        gate::generations_grow_along_a_lineage,
        gate::every_way_to_a_copy_has_the_gate,
        gate::a_copy_that_fails_a_step_is_destroyed_and_its_maker_told,
        lineage::a_child_outlives_its_parent,
        lineage::a_fork_of_a_fork,
        lineage::a_snapshot_outlives_its_ancestors,
        lineage::chained_snapshots,
        lineage::many_children_at_once,
        lineage::a_fork_is_all_or_nothing,
        memory::a_guest_that_frees_memory_shrinks,
        lifecycle::paused_and_resumed,
        lifecycle::hibernated_and_woken_by_use,
        lifecycle::every_way_to_its_files_wakes_it,
        lifecycle::the_ttl_deletes_or_hibernates,
        lifecycle::a_guest_that_dies_is_reported,
        races::a_named_request_is_carried_out_once,
        races::a_snapshot_deleted_while_it_is_restored,
        races::what_ends_under_a_command_says_so,
        races::twenty_commands_wake_it_once,
        races::verbs_cross_a_deletion,
        races::a_command_ends_with_a_caller_who_leaves,
        races::guest_errors_are_no_failures_of_the_node,
        races::one_directory_has_one_node,
        races::building_is_single_flight,
        races::a_stopping_node_lets_things_end,
        observe::events_tell_a_life,
        observe::a_sandbox_is_listed_while_it_is_made,
        observe::events_survive_the_node,
        observe::metrics_count_what_happens,
        previews::a_server_inside_is_reached_by_path,
        previews::events_and_websockets_go_through,
        previews::a_request_wakes_and_copies_serve_for_themselves,
        network::two_restores_at_once_have_network_and_names,
        network::egress_defaults,
        sessions::it_goes_on_without_the_node,
        load::a_slow_command_delays_no_other_sandbox,
        load::thirty_two_clients_and_nothing_is_left,
        stale::a_snapshot_says_why_it_should_be_made_anew,
        secrets::a_node_killed_with_secrets_in_its_hands_gives_them_back,
        clones_traffic::traffic_is_the_originals,
        clones_disk::what_was_acknowledged_is_in_every_copy,
        bench::a_quick_run_measures_and_leaves_nothing,
        clones_random::no_two_copies_draw_the_same,
        templates::a_template_of_ones_own_is_a_file,
        templates::a_code_interpreter_has_its_imports_done,
        clones_random::numpy_begins_anew_in_a_running_process,
        clones_time::clocks_are_right_and_timers_fire,
        clones_services::what_talks_inside_talks_on,
        clones_services::names_and_neighbours_of_another_slot_are_forgotten,
        clones_services::ssh_servers_of_copies_have_keys_of_their_own,
        templates::the_examples_run,
        templates::the_prefork_example_runs,
        crash::a_killed_node_finds_its_machines_again,
        crash::killed_in_the_middle_of_everything,
        failpoints::a_node_killed_at_any_step_of_any_verb,
        failpoints::a_node_killed_while_it_bakes_or_starts,
        disk::a_full_disk_refuses_and_loses_nothing,
        disk::room_is_promised_once,
    ]
}

/// Those that measure times or the whole host: nothing else may run.
const ALONE: &[&str] = &[
    "exec::a_timeout_kills_everything_it_started",
    "exec::a_background_child_does_not_hold_the_call",
    "clones::connections_with_the_outside_are_reset_at_once",
    "memory::a_guest_that_frees_memory_shrinks",
    "load::a_slow_command_delays_no_other_sandbox",
    "load::thirty_two_clients_and_nothing_is_left",
];

/// What the name of one that runs alone begins with: `.config/nextest.toml` gives these all places.
const ALONE_MARK: &str = "alone::";

/// A test's name as the harness has it.
pub fn full_name(name: &str) -> String {
    if ALONE.contains(&name) { format!("{ALONE_MARK}{name}") } else { name.to_owned() }
}

/// Does nothing else run beside it?
pub fn is_alone(full_name: &str) -> bool {
    full_name.starts_with(ALONE_MARK)
}

/// The module that a test is of.
pub fn group(full_name: &str) -> &str {
    let name = full_name.strip_prefix(ALONE_MARK).unwrap_or(full_name);
    name.split("::").next().unwrap_or_default()
}

/// May it run? One sets this machine's clock.
pub fn is_allowed(full_name: &str) -> bool {
    full_name != "times::a_week_later_the_clock_is_right" || std::env::var_os("KEIKI_E2E_CLOCK").is_some()
}

/// The call was refused with this status, and the sentence has these words.
pub fn refused<T>(answer: keiki_client::Result<T>, status: u16, words: &str) -> Result<()> {
    match answer {
        Ok(_) => bail!("it was accepted, not refused with {status} ({words})"),
        Err(error) => {
            let said = error.to_string();
            ensure!(error.status() == Some(status), "status {:?}, not {status}: {said}", error.status());
            ensure!(said.contains(words), "{said:?} does not say {words:?}");
            Ok(())
        }
    }
}
