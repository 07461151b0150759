package org.missioncontrol;

import java.util.List;

/**
 * Names an object, or a stream that a task writes; small, and as Python has it.
 *
 * @param object its name
 * @param worker the worker that has it, as the engine names it
 * @param address of that worker's data plane
 * @param job of the task that made it
 * @param stage of that task
 * @param sizes bytes of each part of an object; nothing for a stream
 * @param copies wanted number of workers that have it
 * @param keep whether workers that fetch parts keep them while there is room
 * @param stream_parts number of parts of a stream; nothing for an object
 */
public record Reference(
        String object,
        String worker,
        String address,
        String job,
        String stage,
        List<Long> sizes,
        Integer copies,
        Boolean keep,
        Integer stream_parts) {

    public boolean isStream() {
        return stream_parts != null;
    }

    /** Number of parts. */
    public int parts() {
        return isStream() ? stream_parts : sizes.size();
    }

    /** Bytes of all parts of an object. */
    public long size() {
        return sizes.stream().mapToLong(Long::longValue).sum();
    }
}
