# Forks, pipes and sorts a megabyte. Arguments: busybox, and a directory to write to.
set -e
box=$1
cd "$2"

$box seq 1 150000 > numbers
echo "bytes $($box wc -c < numbers)"
$box sort -r numbers > reverse &
$box sed 's/1/one/g' numbers > words &
wait
$box sort -n reverse | $box cmp - numbers
echo "sorted $($box cksum < reverse)"
echo "words $($box cksum < words)"
echo "letters $($box tr 0-9 a-j < reverse | $box sort | $box uniq | $box head -n 3 | $box tr '\n' ' ')"

count=0
for status in 0 1 2 3 77 127; do
    code=0
    (exit $status) || code=$?
    test $code = $status
    count=$((count + 1))
done
echo "statuses $count"

# A pipe whose reader ends early.
$box yes | $box head -n 2

# A deep chain.
echo chain | $box cat | $box cat | $box cat | $box cat | $box cat | $box cat | $box cat

$box mkdir -p tree/a/b tree/c
$box cp numbers tree/a/b/one
$box mv tree/a/b/one tree/c/two
$box ln -s c/two tree/link
echo "links $($box head -n 1 tree/link)"
(cd tree && $box find . | $box sort)
$box tar cf tree.tar tree
$box mkdir copy
$box tar xf tree.tar -C copy
$box cmp numbers copy/tree/c/two
$box gzip -c numbers | $box gunzip -c | $box cmp - numbers
$box rm -r tree copy

i=0
while [ $i -lt 50 ]; do
    $box true
    i=$((i + 1))
done
echo "loops $i"

cat <<END
here $((6 * 7))
END
trap 'echo trapped' USR1
kill -USR1 $$
$box awk '{ sum += $1 } END { print "sum", sum }' numbers
echo done
