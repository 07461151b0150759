package org.missioncontrol.workloads;

import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.util.Arrays;
import java.util.List;
import org.missioncontrol.Context;
import org.missioncontrol.Reference;
import org.missioncontrol.Task;

/** Sorts records of 100 bytes with a 10-byte key: the map and the reduce tasks of {@code mission run sort --engine java}. */
public final class Sort {
    private static final int RECORD = 100;
    private static final int KEY = 10;

    private Sort() {}

    /** A record's place, and the start of its key: eight bytes, as a number that orders as they do. */
    private record Place(long start, int place) {}

    private static long startOf(byte[] all, int place) {
        long start = 0;
        for (int index = 0; index < 8; index++) {
            start = start << 8 | (all[place + index] & 0xff);
        }
        return start;
    }

    private static int compareKeys(byte[] one, int first, byte[] other, int second) {
        return Arrays.compareUnsigned(one, first, first + KEY, other, second, second + KEY);
    }

    /** Splits a file into the parts of the reduce tasks, by keys between them. */
    public static final class Map implements Task {
        record Given(String path, List<String> splitters) {}

        @Override
        public Object run(Context context) throws IOException {
            Stopwatch watch = new Stopwatch();
            Given given = context.arguments(Given.class);
            byte[] all = Files.readAllBytes(Path.of(given.path()));
            byte[][] splitters = given.splitters().stream()
                    .map(key -> key.getBytes(StandardCharsets.US_ASCII))
                    .toArray(byte[][]::new);
            int records = all.length / RECORD;
            int[] parts = new int[records];
            int[] sizes = new int[splitters.length + 1];
            for (int record = 0; record < records; record++) {
                int part = partOf(all, record * RECORD, splitters);
                parts[record] = part;
                sizes[part] += RECORD;
            }
            byte[][] split = new byte[sizes.length][];
            int[] filled = new int[sizes.length];
            Arrays.setAll(split, part -> new byte[sizes[part]]);
            for (int record = 0; record < records; record++) {
                int part = parts[record];
                System.arraycopy(all, record * RECORD, split[part], filled[part], RECORD);
                filled[part] += RECORD;
            }
            Reference made = context.put(split);
            context.notePhases(java.util.Map.of("map_s", watch.seconds()));
            return made;
        }

        /** The number of splitters that are not above this key. */
        private static int partOf(byte[] all, int place, byte[][] splitters) {
            int low = 0;
            int high = splitters.length;
            while (low < high) {
                int middle = (low + high) >>> 1;
                if (compareKeys(splitters[middle], 0, all, place) <= 0) {
                    low = middle + 1;
                } else {
                    high = middle;
                }
            }
            return low;
        }
    }

    /** Fetches one part of each map task's object, sorts them together, and writes them to a file. */
    public static final class Reduce implements Task {
        record Given(int index, String path) {}

        @Override
        public Object run(Context context) throws IOException {
            Stopwatch watch = new Stopwatch();
            Given given = context.arguments(Given.class);
            List<Reference> inputs = context.inputs();
            long size = inputs.stream().mapToLong(input -> input.sizes().get(given.index())).sum();
            byte[] all = new byte[Math.toIntExact(size)];
            int filled = 0;
            for (Reference input : inputs) {
                int length = Math.toIntExact(input.sizes().get(given.index()));
                try (InputStream in = context.open(input, given.index())) {
                    if (in.readNBytes(all, filled, length) < length) {
                        throw new IOException("a part of " + input.object() + " is shorter than expected");
                    }
                }
                filled += length;
            }
            double shuffled = watch.seconds();
            Place[] places = new Place[all.length / RECORD];
            Arrays.setAll(places, record -> new Place(startOf(all, record * RECORD), record * RECORD));
            Arrays.sort(places, (one, other) -> {
                int order = Long.compareUnsigned(one.start(), other.start());
                return order != 0 ? order : compareKeys(all, one.place(), all, other.place());
            });
            Path path = Path.of(given.path());
            // All of it is there, or nothing; another run of this task may still write its own.
            Path part = Files.createTempFile(path.getParent(), path.getFileName().toString(), ".part");
            try {
                write(all, places, part);
                Files.move(part, path, StandardCopyOption.ATOMIC_MOVE);
            } finally {
                Files.deleteIfExists(part);
            }
            context.notePhases(java.util.Map.of("shuffle_s", shuffled, "reduce_s", watch.seconds()));
            return all.length;
        }

        private static void write(byte[] all, Place[] places, Path part) throws IOException {
            try (OutputStream out = Files.newOutputStream(part)) {
                byte[] block = new byte[RECORD << 12];
                int used = 0;
                for (Place place : places) {
                    System.arraycopy(all, place.place(), block, used, RECORD);
                    used += RECORD;
                    if (used == block.length) {
                        out.write(block);
                        used = 0;
                    }
                }
                out.write(block, 0, used);
            }
        }
    }
}
