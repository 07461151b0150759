package org.missioncontrol;

import java.util.List;

/**
 * Names an object, or a stream that a task writes; small, and as Python has it.
 *
 * @param object its name
 * @param worker who has it, for the engine
 * @param address who has it, for the data plane
 * @param job of the task that made it
 * @param stage of that task
 * @param sizes bytes of each part of an object; nothing for a stream
 * @param copies how many workers shall have it
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
