package org.missioncontrol;

/**
 * A task that was spawned. Its result can be an input of another call; nobody waits for it otherwise.
 *
 * @param future its name
 */
public record Spawned(String future) {}
