import java.io.IOException;
import java.io.InputStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.zip.CRC32;
import org.missioncontrol.Call;
import org.missioncontrol.Context;
import org.missioncontrol.Outcome;
import org.missioncontrol.Reference;
import org.missioncontrol.Spawned;
import org.missioncontrol.Task;
import org.missioncontrol.WorkerException;

/** What the tests have a task in Java do. */
public class Tried implements Task {
    public record Given(String what, int count) {}

    @Override
    public Object run(Context context) throws Exception {
        Given given = context.arguments(Given.class);
        if (given.what().startsWith("wait:")) {
            return waits(given.what().substring(5));
        }
        if (given.what().startsWith("map:")) {
            return maps(context, given.what().substring(4));
        }
        switch (given.what()) {
            case "arguments":
                return given;
            case "interrupted":
                Thread.currentThread().interrupt();
                return given.count();
            case "spawn named":
                Reference named = context.put(new byte[given.count()]);
                Spawned copied = context.spawn(
                        Call.java(Tried.class).input(named).arguments(new Given("copy", 0)));
                context.tailSpawn(Call.java(Tried.class).input(copied).arguments(new Given("sizes", 0)));
                return null;
            case "nothing":
                return null;
            case "text":
                return "a text: \"ä\" \u2603";
            case "process":
                return ProcessHandle.current().pid();
            case "sum":
                return sum(context);
            case "length":
                return (long) context.fetch(context.inputs().get(0), 0).length;
            case "copy":
                return copy(context);
            case "both":
                return both(context, given.count());
            case "read":
                try (InputStream in = context.open(context.inputs().get(0), 0)) {
                    return new String(in.readAllBytes(), StandardCharsets.US_ASCII);
                }
            case "stream":
            case "stream fails":
                return stream(context, given);
            case "spawn":
                return spawn(context, given.count());
            case "sizes":
                return context.inputs().stream().map(Reference::size).toList();
            case "make":
                return context.put(new byte[given.count()]);
            case "chain":
                if (given.count() == 0) {
                    return context.put("end".getBytes(StandardCharsets.US_ASCII));
                }
                context.tailSpawn(Call.java(Tried.class).arguments(new Given("chain", given.count() - 1)));
                return null;
            case "python":
                context.tailSpawn(Call.python("operator:mul").arguments(List.of(2, 3)));
                return null;
            case "program":
                Reference lines = context.put("b\na\n".getBytes(StandardCharsets.US_ASCII));
                context.tailSpawn(Call.program("sort", Call.in(0)).input(lines));
                return null;
            case "fail":
                throw new IllegalStateException("as planned");
            case "overflow":
                return overflow(1);
            case "exit":
                System.err.println("bye");
                System.exit(7);
                return null;
            case "sleep":
                Thread.sleep(500);
                return given.count();
            case "wait":
                Thread.sleep(300_000);
                return null;
            case "bad requests":
                return bad(context);
            default:
                throw new IllegalArgumentException(given.what());
        }
    }

    private static Object waits(String path) throws IOException {
        Files.writeString(Path.of(path + ".begun"), "");
        try {
            Thread.sleep(300_000);
        } catch (InterruptedException interrupted) {
            Files.writeString(Path.of(path), "");
        }
        return null;
    }

    /** Looks at all inputs where they lie, once somebody says so. */
    private static Object maps(Context context, String path) throws Exception {
        List<ByteBuffer> mapped = new ArrayList<>();
        for (Reference input : context.inputs()) {
            mapped.add(context.map(input, 0));
        }
        Files.writeString(Path.of(path + ".begun"), "");
        while (!Files.exists(Path.of(path))) {
            Thread.sleep(20);
        }
        List<Long> sums = new ArrayList<>();
        for (ByteBuffer own : mapped) {
            CRC32 sum = new CRC32();
            sum.update(own.duplicate());
            sums.add(sum.getValue());
        }
        return sums;
    }

    private static long sum(Context context) throws IOException {
        long sum = 0;
        for (Reference input : context.inputs()) {
            try (InputStream in = context.open(input)) {
                for (int next = in.read(); next >= 0; next = in.read()) {
                    sum += next;
                }
            }
        }
        return sum;
    }

    private static Reference copy(Context context) throws IOException {
        Reference input = context.inputs().get(0);
        byte[][] parts = new byte[input.parts()][];
        for (int part = 0; part < parts.length; part++) {
            parts[part] = context.fetch(input, part);
        }
        return context.put(parts);
    }

    private static Outcome both(Context context, int count) throws IOException {
        List<Reference> made = new ArrayList<>();
        for (int number = 0; number < count; number++) {
            made.add(context.put(new byte[number]));
        }
        return new Outcome(count, made);
    }

    private static Object stream(Context context, Given given) throws IOException {
        Context.Stream out = context.openStream(1);
        for (int number = 0; number < given.count(); number++) {
            out.write(0, (number + "\n").getBytes(StandardCharsets.US_ASCII));
        }
        if (given.what().equals("stream fails")) {
            throw new IllegalStateException("as planned");
        }
        out.close();
        return null;
    }

    private static Object spawn(Context context, int count) throws IOException {
        List<Spawned> made = new ArrayList<>();
        for (int number = 1; number <= count; number++) {
            made.add(context.spawn(Call.java(Tried.class).arguments(new Given("make", number))));
        }
        context.tailSpawn(Call.java(Tried.class).inputs(made).arguments(new Given("sizes", 0)));
        return null;
    }

    private static int overflow(int depth) {
        return overflow(depth + 1) + 1;
    }

    private static Object bad(Context context) throws IOException {
        Reference made = context.put(new byte[3]);
        Reference lost = new Reference(
                "0".repeat(32), made.worker(), made.address(), made.job(), made.stage(), List.of(3L), 1, false, null);
        try {
            context.fetch(lost, 0);
            throw new IllegalStateException("it was found");
        } catch (WorkerException expected) {
            if (expected.status != 502) {
                throw expected;
            }
        }
        try {
            context.spawn(Call.python("no.such:function"));
            throw new IllegalStateException("it was found");
        } catch (WorkerException expected) {
            if (expected.status != 400) {
                throw expected;
            }
        }
        return null;
    }
}
